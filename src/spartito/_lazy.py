"""Packages that import their parts when somebody uses them: ``import spartito`` stays quick."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any


def attach(
    package: str, names: Mapping[str, str], modules: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """A module's ``__getattr__`` (PEP 562) for ``package``, whose ``dir()`` has its ``__all__``.

    What a package imports for itself is no name of its API: the TAB key of a notebook asks here.

    ``names`` maps a public name to the module that defines it, ``modules`` a name to a module.
    """
    module = sys.modules[package]

    def getattr_(name: str) -> Any:
        if name in names:
            return getattr(importlib.import_module(names[name]), name)
        if modules and name in modules:
            return importlib.import_module(modules[name])
        known = [*names, *(modules or ())]
        close = [] if name.startswith("_") else get_close_matches(name, known, n=1)
        guess = f"; did you mean {close[0]!r}?" if close else ""
        raise AttributeError(f"module {package!r} has no attribute {name!r}{guess}")

    def dir_() -> list[str]:
        own = {name for name in vars(module) if name.startswith("__")}
        return sorted(own.union(module.__all__))

    module.__dict__["__dir__"] = dir_
    return getattr_
