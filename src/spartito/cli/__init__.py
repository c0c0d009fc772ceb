"""The command ``spartito``."""

from __future__ import annotations

from collections.abc import Sequence

from spartito.errors import EXIT_INTERRUPTED

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (by default the process's own); returns the exit code."""
    try:
        from spartito.cli.app import main as run  # Ctrl-C may come while it is imported

        return run(argv)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
