"""A forward pass of which one task computes its stage, and leaves out the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from spartito.errors import UserError
from spartito.pipeline.program import UNCOUNTED, Program, is_of_torch, tell


class Reached(Exception):
    """The forward pass has come to the end of a stage: the rest is left out."""


class Replay(TorchFunctionMode):
    """A forward pass that computes the operations from ``begin`` to ``end`` of ``program``.

    Args:
        program: What was recorded.
        begin: The first operation of the stage.
        end: The first one of the next stage.
        known: Values of earlier stages by the id of their `Value`; those that later stages want
            are added.
        wanted: The ids that later stages want.
        swaps: The operations that take values of earlier stages.
        skip: Is told of so many draws of earlier stages, before the stage begins.
        instead: Computes an operation in another way, or says `NotImplemented`.
    """

    def __init__(
        self,
        program: Program,
        begin: int,
        end: int,
        known: dict[int, Tensor],
        wanted: Sequence[int],
        swaps: frozenset[int],
        skip: Callable[[int], None] | None = None,
        instead: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self._program, self._begin, self._end = program, begin, end
        self._known, self._skip, self._instead = known, skip, instead
        self.next, self._over = 0, False
        """The operation that comes next."""
        self._wanted = {program.values[key].born for key in wanted}
        self._keys, self._swaps = frozenset(wanted), swaps

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._over:  # on the way out: what ends a block of no_grad()
            return func(*args, **(kwargs or {}))
        program, index = self._program, self.next
        if func in UNCOUNTED:
            return tell(func, args, program.device)
        if is_of_torch(func):
            return func(*args)
        self.next = index + 1
        if index >= self._end:
            if index < len(program.functions):
                self._over = True
                raise Reached
            raise _another_way(func)
        if func != program.functions[index]:
            raise _another_way(func)
        if index == self._begin and self._skip is not None:
            self._skip(sum(program.draws[:index]))
        if program.shared[index]:
            return func(*args, **(kwargs or {}))
        if index < self._begin:
            return program.results[index]
        kwargs = kwargs or {}
        if index in self._swaps:
            args, kwargs = tree_map(self.swap, (args, kwargs))
        out = NotImplemented
        if self._instead is not None:
            out = self._instead(func, args, kwargs)
        if out is NotImplemented:
            try:
                out = func(*args, **kwargs)
            except (RuntimeError, NotImplementedError) as error:
                if any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves((args, kwargs))):
                    raise _unseen(func) from error
                raise
        if index in self._wanted:
            self._keep(program.results[index], out)
        return out

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block whose operations are not the model's."""
        before, self._over = self._over, True
        try:
            yield
        finally:
            self._over = before

    def again(self, index: int) -> Replay:
        """The same pass from the operation ``index`` on, of which nothing is kept for others."""
        made = copy(self)
        made.next, made._over, made._wanted = index, False, set()
        return made

    def swap(self, value: Any) -> Any:
        """The data that came for a value of an earlier stage; anything else as it is."""
        return self._known.get(id(value), value)

    def within_reach(self, value: Any) -> Any:
        """Data in place of a tensor without: those that came, or some that no operation takes."""
        value = self.swap(value)
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        with torch._C.DisableTorchFunction():  # no operation of the model
            made = torch.empty((), dtype=value.dtype, device=self._program.device)
            return made.expand(value.shape).requires_grad_(value.requires_grad)

    def _keep(self, noted: Any, made: Any) -> None:
        for without, tensor in zip(tree_leaves(noted), tree_leaves(made), strict=True):
            if id(without) in self._keys:
                self._known[id(without)] = tensor


def _unseen(func: Any) -> UserError:
    name = getattr(func, "__name__", str(func))
    return UserError(
        f"{name}() takes a tensor of an earlier stage that torch did not show, as what a full "
        "backward hook of a module or C++ code returns",
        "Begin stages elsewhere by split=[...], or hook the tensor: output.register_hook.",
    )


def _another_way(func: Any) -> UserError:
    name = getattr(func, "__name__", str(func))
    return UserError(
        f"the model's forward pass came to {name}() where an equal batch did something else",
        "In a pipeline its operations may depend on the input alone, not on Python's random "
        "numbers, or counters.",
    )
