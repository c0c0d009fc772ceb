"""Which way a model takes with some data, where it looks at its input.

A forward pass may branch on what depends on the input alone, as models of Transformers do with a
mask in which all is 1. Each way is a `Program` of its own. Every task has the input of every
microbatch, so all of them find the same way, without a message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from spartito.engine.logged import listening
from spartito.mesh.functions import taking
from spartito.mesh.sharded_tensor import here_of
from spartito.mesh.showing_modules import inside
from spartito.pipeline.kept_state import untouched
from spartito.pipeline.program import UNCOUNTED, Program, is_mask, is_of_torch, tell, unchanged
from spartito.pipeline.replay import Reached

_PLAIN = (bool, int, float, list)


def goes(program: Program, model: nn.Module, call: Callable[[], Any]) -> bool:
    """Whether a forward pass does the operations of a program, with results of the same shapes.

    Args:
        program: What was recorded of data of the same shapes.
        model: Whose pass it is; it stays as it is.
        call: Makes the pass, of which nothing is computed that belongs to a stage.

    Returns:
        True at once where the recorded pass looked at nothing.
    """
    if not program.looks:
        return True
    way = _Way(program)
    try:
        with untouched(model), inside(), taking(unchanged), listening(None), way:
            call()
    except Reached:
        return way.is_the_same
    return way.next == len(program.functions)


class _Way(TorchFunctionMode):
    """A pass that is followed up to the last look, or to where it leaves the program's way.

    One that saw what the recorded pass saw goes on like it. One that saw something else may do the
    same all the same, as where a number is only computed with: it is followed to its end.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program, self._over = program, False
        self.next, self._end = 0, max(program.looks) + 1
        self.is_the_same = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        program, index, kwargs = self._program, self.next, kwargs or {}
        if self._over:  # on the way out: what ends a block of no_grad()
            return func(*args, **kwargs)
        if func in UNCOUNTED:
            return tell(func, args, program.device)
        if is_of_torch(func):
            return func(*args)
        self.next = index + 1
        if index == self._end:
            self._leave(is_the_same=index < len(program.functions))
        if index == len(program.functions) or func != program.functions[index]:
            self._leave(is_the_same=False)
        noted = program.results[index]
        if not program.shared[index] and index not in program.looks:
            return noted
        if not program.shared[index]:
            args = tree_map(_on_host, args)
        made = func(*args, **kwargs)
        if _shapes(made) != _shapes(noted):
            self._leave(is_the_same=False)
        if index in program.looks and not _equal(made, noted):
            self._end = -1
        return made if program.shared[index] else noted

    def _leave(self, is_the_same: bool) -> None:
        self._over, self.is_the_same = True, is_the_same
        raise Reached


def _on_host(value: Any) -> Any:
    """A mask where torch wants it for a tensor without data; anything else as it is."""
    return value.cpu() if is_mask(value) and not value.is_meta else value


def _shapes(value: Any) -> list[torch.Size]:
    return [here_of(leaf).shape for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _equal(made: Any, noted: Any) -> bool:
    """Whether a look brought what it did before: a number, or a tensor, of which the shape counts.

    What cannot be compared by ``==`` counts as something else.
    """
    return isinstance(made, Tensor) or (isinstance(made, _PLAIN) and made == noted)
