"""Packages that Spartito uses where they are installed, by an extra or by hand."""

from __future__ import annotations

import importlib
from typing import Any

from spartito.errors import UserError


def package(name: str, without: str, remedy: str) -> Any:
    """Import a package that may be missing.

    Args:
        name: Its module.
        without: What cannot be done without it, for the error.
        remedy: How it is installed.

    Returns:
        The module.

    Raises:
        UserError: It cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{without}: {error}", remedy) from error
