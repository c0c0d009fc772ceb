"""Whether the examples of a batch see each other in a model's forward pass.

Replicas have parts of a batch. A mean over the batch, a softmax over it or attention between its
rows would be over a part there, and give other numbers than on one device.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from spartito.engine.gradients.gradient_hooks import is_of_user
from spartito.engine.logged import listening
from spartito.engine.modules.batchnorm import idle_norms
from spartito.engine.modules.trial_passes import rows_of, untouched, watching_meetings
from spartito.engine.randomness.keyed_draws import Drawing, Fill, Shape, filled
from spartito.engine.step_context import within
from spartito.errors import UserError
from spartito.notes import note

FEW = 2
"""Rows of the pass that is compared with one of all rows."""
DRAWS = 31
"""Of which the median is the number for all rows: of a dropout, whether most are kept."""


def check_rows(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> None:
    """Refuse a model of which some rows give other outputs where others are beside them.

    It is run with two rows, with all (three at least), and with two again, without statistics of
    BatchNorm (which has those of all replicas) and with the same random numbers for all rows. What
    it returns for other than the examples in the first dim is not compared. A model that cannot be
    run so, or that does not give the same twice, is let be; so is one that calls `strategy.reduce`
    or `gather` in its forward pass.

    Args:
        module: The model.
        args: What it is called with, ...
        kwargs: ... also by keyword.
        size: The rows of that. Where there is none it is run as well, on zeros, since others may
            meet it there, and nothing is compared.

    Raises:
        UserError: Rows see each other.
    """
    found, all_, draws = [], max(size, FEW + 1), _AlikeForAll()
    with watching_meetings() as has_met:
        for count in (FEW, all_, FEW):
            given = rows_of((args, kwargs), size, count)
            if given is None:
                return
            try:
                found.append(_output(module, draws, *given))
            except Exception as error:  # as one that wants more rows; the training will tell
                note("%s cannot be tried with %d rows: %r", type(module).__name__, count, error)
                return
        if not size or has_met():  # it asks the rows of all replicas
            return
    few, many, again = ([*map(_plain, tree_leaves(each))] for each in found)
    if not len(few) == len(many) == len(again):
        return
    for one, other, same in zip(few, many, again, strict=True):
        if one is None or other is None or same is None or not torch.equal(one, same):
            continue
        if len(one) != FEW or len(other) != all_ or one.shape[1:] != other.shape[1:]:
            continue
        gap, scale = float((one - other[:FEW]).abs().max()), float(other[:FEW].abs().max())
        if isfinite(gap) and isfinite(scale) and gap > draws.rounding**0.5 * scale:
            raise UserError(
                f"the examples of a batch see each other in {type(module).__name__}'s forward "
                f"pass, deterministic: beside another example, two give outputs that differ by "
                f"{gap:.1g} of {scale:.1g}, and a replica has a part of the batch",
                "Take what is of each example alone (LayerNorm, a mean over its own dims), or "
                "BatchNorm, which has the rows of all replicas. Or train on one device, or leave "
                "deterministic=True out.",
            )


def _output(
    module: nn.Module, draws: _AlikeForAll, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    with (
        untouched(module), _without_hooks(module), torch.no_grad(), within(None), listening(None),
        warnings.catch_warnings(), idle_norms(module), draws,
    ):  # fmt: skip
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        return module(*args, **kwargs)


def _plain(leaf: Any) -> Tensor | None:
    """A leaf of an output that can be compared: a tensor with rows, whole on this task."""
    is_one = type(leaf) is Tensor and leaf.dim() > 0 and leaf.numel() > 0
    return leaf if is_one and (leaf.is_floating_point() or leaf.is_complex()) else None


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """A block in which hooks of the user's are not called: they may keep what they see."""
    left_out: list[tuple[Any, int, Any]] = []
    for each in module.modules():
        for hooks in (each._forward_pre_hooks, each._forward_hooks):
            for key, hook in [*hooks.items()]:
                if is_of_user(hook):
                    left_out.append((hooks, key, hook))
    before = {id(hooks): (hooks, [*hooks.items()]) for hooks, _, _ in left_out}
    for hooks, key, _ in left_out:
        del hooks[key]
    try:
        yield
    finally:
        for hooks, items in before.values():  # in their order
            hooks.clear()
            hooks.update(items)


class _AlikeForAll(Drawing):
    """Random operations give the same number for all rows; and how coarsely all are rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.rounding = 0.0
        """The coarsest that was seen, as a part of a number."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex()):
                self.rounding = max(self.rounding, _rounding(each))
        return made

    def draw(self, func: Any, shape: Shape, dtype: torch.dtype, fill: Fill) -> Tensor:
        """One number in a tensor of ``shape``."""
        drawn = filled((DRAWS,), dtype, fill, torch.Generator().manual_seed(0))
        return drawn.median().expand(shape)


def _rounding(made: Tensor) -> float:
    """How an operation has rounded what it made."""
    is_single = made.dtype in (torch.float32, torch.complex64)
    coarse = is_single and _multiplies_coarsely(made.device)
    return torch.finfo(torch.bfloat16 if coarse else made.dtype).eps


def _multiplies_coarsely(device: torch.device) -> bool:
    """Whether products of fp32 may be of fewer bits, as by TF32."""
    try:
        return device.type != "cpu" or torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # it was chosen for one backend and not for another
        return True
