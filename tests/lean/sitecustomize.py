"""On the path of every program that a test starts: torch's compiler is imported when it is used.

The first optimizer of a process imports all of ``torch._dynamo``, for two decorators that do
nothing where nothing is compiled. That is half of a process's start, and tests start hundreds.
A tenth more goes into looking again and again for garbage among all that is imported.
"""

from __future__ import annotations

import faulthandler
import gc
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


class Uncompiled(ModuleType):
    """What optimizers ask of the compiler; whoever asks for more gets the compiler itself."""

    def disable(self, function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        return function

    def graph_break(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # somebody looks through all modules
            raise AttributeError(name)
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


gc.set_threshold(100_000, *gc.get_threshold()[1:])
faulthandler.register(signal.SIGRTMAX, 2)  # tests.stacks asks for it
sys.modules["torch._dynamo"] = Uncompiled("torch._dynamo")
