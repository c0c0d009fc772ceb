"""The options of an optimizer's parameter groups, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

SETTINGS = (bool, int, float, str, list, tuple, type(None))
_KEPT = (*SETTINGS, Tensor)
_PLAIN = {*SETTINGS} - {list}  # as most are: looked at in every step
"""What an option of a parameter group is, to be sent along with a push."""
KERNELS = frozenset({"capturable", "differentiable", "foreach", "fused"})
"""Options that say how a process computes its update, not which: each keeps its own."""


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group: learning rate, decay and what else it has."""
    return [
        {
            name: float(value) if isinstance(value, Tensor) else value
            for name, value in group.items()
            if type(value) in _PLAIN or (name != "params" and isinstance(value, _KEPT))
        }
        for group in optimizer.param_groups
    ]


def set_options(groups: Sequence[dict[str, Any]], options: Sequence[Mapping[str, Any]]) -> None:
    """Give parameter groups the options that `settings` returned, as far as they have such."""
    for group, new in zip(groups, options, strict=True):
        for name in (new.keys() & group.keys()) - KERNELS:
            group[name] = tuple(new[name]) if isinstance(group[name], tuple) else new[name]
