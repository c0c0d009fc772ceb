"""Libraries that are imported so that numbers stay in fp64, and with what they need alone."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def in_double() -> Iterator[None]:
    """Make new parameters in fp64, and keep what libraries cast to fp32 there as it is."""
    to_float = Tensor.float
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    Tensor.float = lambda self: self if self.dtype == torch.float64 else to_float(self)  # type: ignore
    try:
        yield
    finally:
        Tensor.float = to_float  # type: ignore[method-assign]
        torch.set_default_dtype(before)


class _Wide:
    """torch, but that its fp32 is fp64: for modules that compute norms and losses in fp32."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def transformers(name: str) -> Any:
    """The class ``name`` of Transformers, whose modules know no fp32 from here on."""
    found = getattr(importlib.import_module("transformers"), name)
    for path, module in list(sys.modules.items()):
        ours = path.startswith(("transformers.models.", "transformers.loss."))
        if ours and vars(module).get("torch") is torch:
            module.torch = _Wide()  # type: ignore[attr-defined]
    return found


def timm() -> Any:
    """timm, which imports torchvision for images that nobody reads here.

    torchvision for a CPU is not on PyPI, and one for CUDA cannot be imported beside this torch.
    So names stand in for it while timm is imported, and are gone afterwards.
    """
    if "timm" in sys.modules or importlib.util.find_spec("torchvision"):
        return importlib.import_module("timm")
    for name in _NAMES:
        path = f"torchvision.{name}".removesuffix(".")
        module = sys.modules[path] = _Absent(path)
        if name:
            parent, _, last = path.rpartition(".")
            setattr(sys.modules[parent], last, module)
    try:
        importlib.import_module("timm.models")
    finally:
        for path in [path for path in sys.modules if path.partition(".")[0] == "torchvision"]:
            del sys.modules[path]
    return importlib.import_module("timm")


_NAMES = (
    "",
    "datasets",
    "models",
    "models.feature_extraction",
    "ops",
    "ops.misc",
    "transforms",
    "transforms.functional",
    "utils",
)


class _Name(type):
    """A class with any attribute, each of them another class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


class _Absent(ModuleType):
    """A module with any name in it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.__spec__ = ModuleSpec(path, None, is_package=True)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (nn.Module,) if name == "FrozenBatchNorm2d" else (), {})
