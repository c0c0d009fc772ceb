"""Notes how tensors get their values, so that each can be made later, alone.

Inside of `meta` tensors lie on torch's meta device, and say that they are on the CPU. Each
operation that gives one values is noted; what draws at random is drawn once there, in memory that
is let go of at once, so that torch's generator goes on as if all were made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import numpy
import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

from spartito.errors import UserError

LARGE = 1 << 18
"""Bytes from which on a tensor has pages of its own while it is made."""
_VERSION = "_spartito_version"
CPU, META = torch.device("cpu"), torch.device("meta")
_OVERWRITES = frozenset(
    f"{name}_"
    for name in (
        *("bernoulli", "cauchy", "copy", "exponential", "fill", "geometric", "log_normal"),
        *("normal", "random", "uniform", "zero"),
    )
)
"""Operations after which it does not matter what was there."""


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
    return _NOTES.value(_slot(tensor)) if tensor.is_meta else tensor.detach()


def memory(nbytes: int) -> UntypedStorage:
    """Memory that goes back to the system with the last tensor in it.

    The allocator keeps what is freed between tensors that stay, and has no gap for the
    next large one: a task that keeps halves took twice their size.

    Args:
        nbytes: How much.
    """
    if nbytes < LARGE:
        return UntypedStorage(nbytes)
    pages = mmap(-1, nbytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()


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


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor without data, as a part of what it shares memory with."""

    key: int
    nbytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    def within(self, storage: UntypedStorage) -> Tensor:
        """The tensor with data."""
        made = torch.empty(0, dtype=self.dtype)
        return made.set_(storage, self.offset, self.size, self.stride)

    @property
    def is_all(self) -> bool:
        """Whether it covers all of its memory."""
        return torch.Size(self.size).numel() * self.dtype.itemsize >= self.nbytes


def _slot(tensor: Tensor) -> _Slot:
    storage, size = tensor.untyped_storage(), tuple(tensor.shape)
    return _Slot(
        storage._cdata,
        storage.nbytes(),
        tensor.dtype,
        size,
        tensor.stride(),
        tensor.storage_offset(),
    )


@dataclass(frozen=True, eq=False, slots=True)
class _Step:
    """One operation: its arguments, with slots for tensors, and what it gives values."""

    number: int
    func: Any
    leaves: tuple[Any, ...]
    form: TreeSpec
    fresh: Mapping[int, int]  # which of its outputs is in which new memory
    dtype: torch.dtype  # torch's default
    generator: torch.Generator
    state: Tensor | None  # of the generator, where it draws

    def begins(self, key: int) -> bool:
        """Whether it does not matter what was in this memory before."""
        if key in self.fresh:
            return True
        first, *rest = self.leaves or (None,)
        return (
            self.func.overloadpacket.__name__ in _OVERWRITES
            and isinstance(first, _Slot)
            and first.key == key
            and first.is_all
            and not any(isinstance(leaf, _Slot) and leaf.key == key for leaf in rest)
        )

    @property
    def slots(self) -> list[_Slot]:
        """Its arguments that are tensors without data."""
        return [leaf for leaf in self.leaves if isinstance(leaf, _Slot)]

    @property
    def touches(self) -> set[int]:
        """The memory that it reads or writes."""
        return {slot.key for slot in self.slots} | self.fresh.keys()

    def again(self, given: Mapping[int, UntypedStorage]) -> Any:
        """Compute it with the numbers that it drew; the generator goes on as if it had not."""
        if self.state is None:
            return self.run(given)
        now = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            return self.run(given)
        finally:
            self.generator.set_state(now)

    def run(self, given: Mapping[int, UntypedStorage]) -> Any:
        """Compute it, with the memory that its arguments lie in."""
        leaves = [
            leaf.within(given[leaf.key]) if isinstance(leaf, _Slot) else leaf
            for leaf in self.leaves
        ]
        args, kwargs = tree_unflatten(leaves, self.form)
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.no_grad():
                return self.func(*args, **kwargs)
        finally:
            torch.set_default_dtype(default)


class _Notes:
    """What gave which memory its values, in order."""

    def __init__(self) -> None:
        self.steps: dict[int, list[_Step]] = {}
        self.alive: dict[int, UntypedStorage] = {}  # so that no key comes twice
        self.is_noting = False
        self.seen: list[Tensor] = []  # in this block, by modules or by writes
        self._numbers = count()

    def add(self, func: Any, leaves: Any, form: TreeSpec, outputs: Any, writes: Any) -> None:
        """Note an operation that makes ``outputs``, and writes into the tensors ``writes``."""
        known = {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor)}
        fresh = {}
        for number, output in enumerate(outputs):
            if isinstance(output, Tensor) and output.is_meta:
                storage = output.untyped_storage()
                if storage._cdata not in known:
                    fresh[storage._cdata] = number
                    self.seen.append(output)
                    self.alive[storage._cdata] = storage
                    self.steps[storage._cdata] = []
        self.seen += writes
        written = [tensor.untyped_storage() for tensor in writes]
        if not fresh and not written:
            return
        self.alive |= {storage._cdata: storage for storage in written}
        draws = torch.Tag.nondeterministic_seeded in func.tags
        generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        generator = next(iter(generators), torch.default_generator)
        step = _Step(
            next(self._numbers),
            func,
            tuple(map(_noted, leaves)),
            form,
            fresh,
            torch.get_default_dtype(),
            generator,
            generator.get_state() if draws else None,
        )
        if draws:
            step.run(self._given(step))
        for key in dict.fromkeys([*fresh, *(storage._cdata for storage in written)]):
            self.steps.setdefault(key, []).append(step)

    def value(self, slot: _Slot) -> Tensor:
        """What a tensor has now."""
        return slot.within(self._storage(slot.key))

    def _storage(self, key: int, before: float = math.inf) -> UntypedStorage:
        """All of some memory, as it was before a step: each operation it came of, once."""
        needed = self._needed(key, before)
        last = {touched: step.number for step in needed for touched in step.touches}
        held: dict[int, UntypedStorage] = {}
        for step in needed:
            for slot in step.slots:
                if slot.key not in held:  # it is overwritten
                    held[slot.key] = memory(slot.nbytes)
            made = tree_leaves(step.again(held))
            held |= {fresh: made[number].untyped_storage() for fresh, number in step.fresh.items()}
            for touched in step.touches:
                if touched != key and last[touched] == step.number:
                    del held[touched]
        return held[key] if key in held else memory(self.alive[key].nbytes())

    def _needed(self, key: int, before: float) -> list[_Step]:
        """The operations that some memory came of, in their order."""
        found: dict[int, _Step] = {}
        todo = [(key, before)]
        while todo:
            key, before = todo.pop()
            steps = [step for step in self.steps.get(key, ()) if step.number < before]
            starts = [number for number, step in enumerate(steps) if step.begins(key)]
            for step in steps[starts[-1] if starts else 0 :]:
                if step.number not in found:
                    found[step.number] = step
                    kept = [slot.key for slot in step.slots if not step.begins(slot.key)]
                    todo += [(each, step.number) for each in kept]
        return [found[number] for number in sorted(found)]

    def _given(self, step: _Step) -> dict[int, UntypedStorage]:
        """The memory of a step's arguments, as it was then."""
        return {
            slot.key: memory(slot.nbytes)
            if step.begins(slot.key)
            else self._storage(slot.key, step.number)
            for slot in step.slots
        }


_NOTES = _Notes()


def _noted(leaf: Any) -> Any:
    """An argument as it is kept: values that may change are copied."""
    if isinstance(leaf, Tensor):
        return _slot(leaf) if leaf.is_meta else leaf.detach().clone()
    return CPU if isinstance(leaf, torch.device) and leaf == META else leaf


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
