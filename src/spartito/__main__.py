"""``python -m spartito`` is the command ``spartito``."""

from __future__ import annotations

import sys

from spartito_command import main

if __name__ == "__main__":
    sys.exit(main())
