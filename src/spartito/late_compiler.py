"""Torch's compiler is imported by who compiles, and not by the first optimizer.

An optimizer of torch asks its compiler, ``torch._dynamo``, to leave some methods alone and to
interrupt a graph, also where nothing is compiled. To import it takes about twice as long as torch
itself. While it is not imported nothing is traced, so there is nothing to leave alone: a stand-in
says yes to these two questions, and whatever else is asked of it, it makes way for the compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"
MARK = "__dynamo_disable"
"""Where torch notes what it calls instead of a function that is to be left alone."""


class StandIn(ModuleType):
    """What optimizers ask of the compiler; whoever asks for more gets the compiler itself."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.__path__ = []  # of a package; `_Finder` finds what lies in it
        self.__spec__ = ModuleSpec(NAME, None, is_package=True)
        self._marked: list[Callable[..., Any]] = []

    def disable(self, *args: Any, **kwargs: Any) -> Any:
        """As the compiler's, where torch's own decorator asks for it: the function as it is."""
        match args, kwargs:
            case (Callable() as function, bool()), {"wrapping": False, **others} if not others:
                self._marked.append(function)
                return function
        return self.compiler().disable(*args, **kwargs)

    def graph_break(self, *args: Any, **kwargs: Any) -> None:
        """As the compiler's outside of what it compiles: nothing."""

    def compiler(self) -> ModuleType:
        """The compiler itself, from now on where this was."""
        if sys.modules.get(NAME) is self:
            sys.modules.pop(NAME, None)
            while self._marked:  # torch asks again
                with suppress(AttributeError):
                    delattr(self._marked.pop(), MARK)
        return import_module(NAME)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # somebody looks through all modules
            raise AttributeError(f"module {NAME!r} has no attribute {name!r}")
        return getattr(self.compiler(), name)


class _Finder(MetaPathFinder, Loader):
    """Makes way for the compiler when a module of it is imported by its own name."""

    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{NAME}.") or sys.modules.get(NAME) is not self._stand_in:
            return None
        self._stand_in.compiler()
        try:
            self._spec = import_module(name).__spec__
        except ModuleNotFoundError:
            return None
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # it is there, as it was


def put_off() -> None:
    """Have the compiler imported when somebody uses it, if it is not yet."""
    if NAME not in sys.modules:
        stand_in = StandIn()
        sys.modules[NAME] = stand_in
        sys.meta_path.insert(0, _Finder(stand_in))
