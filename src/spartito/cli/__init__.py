"""The command ``spartito``."""

from spartito.cli.app import main

__all__ = ["main"]
