"""A simulated accelerator, the device ``sim``: torch's kernels for CPUs on memory that is hidden.

A tensor of it is a wrapper, and what is done with it is done with the hidden one. Tensors of the
CPU beside it are an error. `counts` has how often values were read, and tensors went across.
A process that has called `register` has the device for as long as it lives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

NAME = "sim"
READS, COPIES = "reads", "copies"
counts: Counter[str] = Counter()

_aten = torch.ops.aten
_CROSSING = (_aten.copy_.default, _aten._to_copy.default)


class Simulated(Tensor):
    """A tensor of the device."""

    hidden: Tensor

    @staticmethod
    def __new__(cls, hidden: Tensor) -> Simulated:
        made: Simulated = torch.Tensor._make_wrapper_subclass(
            cls, hidden.size(), strides=hidden.stride(), storage_offset=hidden.storage_offset(),
            dtype=hidden.dtype, layout=hidden.layout, device=torch.device(NAME, 0),
        )  # fmt: skip
        made.hidden = hidden
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Simulated({self.hidden!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _run(func, args, dict(kwargs or {}))


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an operation with what is hidden, and wrap what comes of it."""
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    ours = {id(each.hidden): each for each in given if isinstance(each, Simulated)}
    if func is _aten._local_scalar_dense.default:
        counts[READS] += 1
    if func in _CROSSING:
        counts[COPIES] += 1
    elif ours and any(not isinstance(each, Simulated) and each.dim() for each in given):
        raise RuntimeError(f"{func}: tensors of the CPU beside tensors of {NAME}")
    device = kwargs.get("device")
    wraps = bool(ours) if device is None else torch.device(device).type == NAME
    if func is _aten.copy_.default:
        wraps = isinstance(args[0], Simulated)
    args, kwargs = tree_map(_shown, (args, kwargs))
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    found = func(*args, **{**kwargs, **({"pin_memory": False} if "pin_memory" in kwargs else {})})

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or any(value is each for each in given):
            return value
        if id(value) in ours:
            return ours[id(value)]
        return Simulated(value) if wraps else value

    return tree_map(wrap, found)


def _shown(value: Any) -> Any:
    return value.hidden if isinstance(value, Simulated) else value


class _Module:
    """What torch asks of the module of a device."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """It draws from the CPU's generator."""


def register() -> torch.library.Library:
    """Let torch have the device; what it returns is to be kept."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    made = torch.library.Library("aten", "IMPL")

    def empty(size: Any, **options: Any) -> Tensor:
        return Simulated(torch.empty(size, dtype=options.get("dtype")))

    def empty_strided(size: Any, stride: Any, **options: Any) -> Tensor:
        return Simulated(torch.empty_strided(size, stride, dtype=options.get("dtype")))

    made.impl("empty.memory_format", empty, "PrivateUse1")
    made.impl("empty_strided", empty_strided, "PrivateUse1")
    return made
