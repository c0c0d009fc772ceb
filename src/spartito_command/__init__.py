"""What the installed command ``spartito`` calls.

It stands beside Spartito and imports nothing at first, so that Ctrl-C while Spartito is imported
ends the command as later: without a traceback.
"""

from __future__ import annotations


def main() -> int:
    """Run the command; returns the exit code."""
    try:
        from spartito.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130
