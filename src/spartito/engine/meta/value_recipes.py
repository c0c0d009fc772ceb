"""Notes how tensors get their values, so that each can be made later, alone.

Inside of `meta` tensors lie on torch's meta device, and say that they are on the CPU. Each
operation that gives one values is noted; what draws at random is drawn once there, in memory that
is let go of at once, so that torch's generator goes on as if all were made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from spartito.engine.meta.recipe_operations import CPU, META, Notes, slot_of
from spartito.errors import UserError

_VERSION = "_spartito_version"


@contextmanager
def meta() -> Iterator[None]:
    """A block in which models are built without values, for strategies that divide them.

        torch.manual_seed(0)
        with sp.meta():
            net = Net()

    What a strategy prepares gets the values that it would have without the block, bit for bit,
    random ones too, buffers too; under mesh, sharded and pipeline a task makes one tensor at a
    time, and keeps its part. Code in the block that looks at a value gets it. Change dtypes
    inside, as ``Net().double()``.

    Returns:
        A context manager.
    """
    if _NOTES.is_noting:
        yield
        return
    hooks = [
        register_module_parameter_registration_hook(_registered),
        register_module_buffer_registration_hook(_registered),
    ]
    _NOTES.is_noting = True
    try:
        with _Disguise(), _Noting():  # type: ignore[no-untyped-call]
            yield
    finally:
        _NOTES.is_noting = False
        for hook in hooks:
            hook.remove()
        for tensor in _NOTES.seen:
            setattr(tensor, _VERSION, tensor._version)
        _NOTES.seen.clear()


def is_written_outside(tensor: Tensor) -> bool:
    """Whether a tensor without values was written into after the block, which nobody noted.

    Args:
        tensor: One on the meta device; what was written into its ``.data`` is not known.
    """
    return bool(tensor._version != getattr(tensor, _VERSION, tensor._version))


def _registered(module: nn.Module, name: str, tensor: Tensor | None) -> None:
    if tensor is not None and is_lazy(tensor):
        raise UserError(
            f"a lazy {type(module).__name__} in sp.meta()",
            "Give its sizes, or build the model without sp.meta().",
        )
    if tensor is not None:
        _NOTES.seen.append(tensor)


def is_noted(tensor: Tensor) -> bool:
    """Whether `value_of` can make a tensor on the meta device.

    Args:
        tensor: Any.
    """
    key = tensor.untyped_storage()._cdata
    return any(step.begins(key) for step in _NOTES.steps.get(key, ()))


def value_of(tensor: Tensor) -> Tensor:
    """Make what a tensor on the meta device stands for; anything else is returned as it is.

    Args:
        tensor: One for which `is_noted` holds.

    Returns:
        A tensor on the CPU, in memory of its own.
    """
    return _NOTES.value(slot_of(tensor)) if tensor.is_meta else tensor.detach()


def key_of(tensor: Tensor) -> int:
    """What notes of a tensor are kept under, for `forget`.

    Args:
        tensor: One on the meta device.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


def forget(keys: Iterable[int]) -> None:
    """Let go of notes of tensors that are not made again, and that no other one is made of.

    Args:
        keys: What `key_of` gave.
    """
    for key in keys:
        _NOTES.steps.pop(key, None)
        _NOTES.alive.pop(key, None)


_NOTES = Notes()


class _Noting(TorchDispatchMode):
    """Makes tensors without data, and notes what would have given them data."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return _compute(func, args, kwargs or {})


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, form = tree_flatten((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if given:
        is_noted = any(tensor.is_meta for tensor in given)
    else:
        is_noted = (kwargs.get("device") or CPU).type in ("cpu", "meta")
    if not is_noted:
        return func(*args, **kwargs)
    writes = list(_written(func, args, kwargs))
    if not all(tensor.is_meta for tensor in writes):
        return _really(func, args, kwargs)
    if writes and torch.Tag.nondeterministic_seeded in func.tags:
        made = writes[0]
    else:
        empty = [_empty(leaf) for leaf in leaves]
        if not given:
            kwargs_here = {**tree_unflatten(empty, form)[1], "device": META}
        else:
            kwargs_here = tree_unflatten(empty, form)[1]
        try:
            made = func(*tree_unflatten(empty, form)[0], **kwargs_here)
        except (RuntimeError, NotImplementedError):  # the result depends on values, or is one
            found = _really(func, args, kwargs)  # an error of the caller's is raised here
            if not writes:
                return found
            made = writes[0]
    _NOTES.add(func, leaves, form, tree_leaves(made), writes)
    return made


def _really(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute with values, for code that looks at them."""
    args, kwargs = tree_map_only(Tensor, value_of, (args, kwargs))
    return func(*args, **kwargs)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The arguments that an operation changes."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _empty(leaf: Any) -> Any:
    """An argument without data."""
    if isinstance(leaf, torch.Generator):
        return None
    if isinstance(leaf, torch.device) and leaf == CPU:
        return META
    if isinstance(leaf, Tensor) and not leaf.is_meta:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=META)
    return leaf


def _here(leaf: Any) -> Any:
    """A device as it is for tensors without data."""
    is_cpu = isinstance(leaf, str | torch.device) and torch.device(leaf) == CPU
    return META if is_cpu else leaf


_IS_META, _DEVICE = Tensor.is_meta.__get__, Tensor.device.__get__  # type: ignore[attr-defined]
_LOOKS = (Tensor.numpy, Tensor.tolist, Tensor.__array__)


class _Disguise(TorchFunctionMode):
    """Has tensors say that they are on the CPU: torch.nn.init passes over those on meta."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _IS_META:
            return False
        if func == _DEVICE:
            device = func(*args)
            return CPU if device == META else device
        if func in _LOOKS and args[0].is_meta:
            with _disable_current_modes():
                found = func(value_of(args[0]), *args[1:], **kwargs)
            if isinstance(found, numpy.ndarray):
                found.setflags(write=False)  # what is written there would be lost
            return found
        if func is Tensor.cpu and args[0].is_meta:
            return args[0]
        if func is Tensor.to and args[0].is_meta:  # no copy where it is said to be already
            args, kwargs = tree_map(_here, (args, kwargs))
        if func is Tensor.__deepcopy__ and args[0].is_meta:
            return args[1].setdefault(id(args[0]), args[0].detach().clone())
        return func(*args, **kwargs)
