"""What makes an update of the mean difference that groups bring to a meeting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

from spartito.engine.updates.divided_update import is_elementwise
from spartito.engine.updates.optimizers import move_state
from spartito.errors import UserError
from spartito.numeric import is_number

OuterFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
OuterOptimizer = str | Mapping[str, float] | OuterFactory | None
"""What a strategy's ``outer`` may be."""

_WAYS = (
    "None averages, 'diloco' or {'lr': 0.7, 'momentum': 0.9} is Nesterov's momentum; or give "
    "a function of the parameters that returns a torch optimizer."
)


@dataclass(frozen=True, slots=True)
class DiLoCo:
    """Nesterov's momentum on the groups' mean difference (Douillard et al. 2023).

    Args:
        lr: Its learning rate.
        momentum: Its momentum.

    Raises:
        UserError: A rate or a momentum that trains nothing.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        for name, value in (("lr", self.lr), ("momentum", self.momentum)):
            if not is_number(value):
                raise UserError(f"outer with {name}={value!r}", "It is a number.")
        if not (self.lr > 0 and 0 <= self.momentum < 1):
            raise UserError(
                f"outer with lr={self.lr!r}, momentum={self.momentum!r}",
                "lr > 0, and 0 <= momentum < 1.",
            )

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """The optimizer of these parameters."""
        return SGD(parameters, self.lr, momentum=self.momentum, nesterov=self.momentum > 0)


@dataclass(frozen=True, slots=True)
class Average:
    """The weighted mean of the groups' models (Stich 2019)."""

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """The optimizer of these parameters."""
        return SGD(parameters, 1.0)


def choose(outer: OuterOptimizer) -> OuterFactory:
    """What makes the outer optimizer.

    Args:
        outer: None or "average", "diloco", its numbers, or a function of the parameters.

    Returns:
        A function of the parameters.

    Raises:
        UserError: For anything else.
    """
    if outer is None or outer == "average":
        return Average()
    if outer == "diloco":
        return DiLoCo()
    if isinstance(outer, Mapping):
        if unknown := [name for name in outer if name not in ("lr", "momentum")]:
            raise UserError(f"outer with {unknown[0]!r}", _WAYS)
        return DiLoCo(**outer)
    if isinstance(outer, Optimizer):
        raise UserError(
            f"outer={type(outer).__name__}(...), whose parameters are not those that meet",
            "Give a function: outer=lambda parameters: torch.optim.Adam(parameters, 0.01).",
        )
    if not callable(outer):
        raise UserError(f"outer={outer!r}", _WAYS)
    return outer


def make_outer(
    factory: OuterFactory, parameters: Sequence[nn.Parameter], is_divided: bool = False
) -> Optimizer:
    """The outer optimizer of these parameters.

    Args:
        factory: What `choose` returned.
        parameters: The leader's copies of those that meet.
        is_divided: Whether they are parts of parameters, flat.

    Returns:
        A fresh optimizer of all of them.

    Raises:
        UserError: If it is none, leaves some out, needs a closure, or has parts of parameters and
            may look at whole ones.
    """
    made: object = factory(parameters)
    if not isinstance(made, Optimizer):
        raise UserError(f"the outer function returned {type(made).__name__}", _WAYS)
    if isinstance(made, LBFGS):
        raise UserError("LBFGS as outer optimizer: it wants to compute losses", _WAYS)
    known = {id(p) for group in made.param_groups for p in group["params"]}
    if known != {id(p) for p in parameters}:
        raise UserError(
            f"the outer optimizer has {len(known)} parameters, of {len(parameters)} that meet",
            "It takes all that it is given, and no others.",
        )
    if is_divided and (not is_elementwise(made) or len(made.param_groups) > 1):
        raise UserError(
            f"an outer {type(made).__name__} with {len(made.param_groups)} groups of parameters, "
            "over groups that keep shards: it is given parts of parameters, flat",
            "Choose SGD, AdamW or another that updates each element by itself, and all alike; or "
            "leave inside out.",
        )
    return made


def outer_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """The outer optimizer's state under the user's names.

    Args:
        optimizer: What `make_outer` returned.
        names: Of its parameters, by id.

    Returns:
        "class" and "state".
    """
    state = {names[id(p)]: dict(values) for p, values in optimizer.state.items()}
    return {"class": type(optimizer).__name__, "state": state}


def load_outer_state(
    optimizer: Optimizer, named: Mapping[str, nn.Parameter], saved: Mapping[str, Any]
) -> None:
    """Take back what `outer_state` returned.

    Args:
        optimizer: A fresh one.
        named: Its parameters by the user's names.
        saved: The state; of parameters that are not here it is left out.

    Raises:
        UserError: It is that of another class, or of other shapes.
    """
    if saved["class"] != type(optimizer).__name__:
        raise UserError(
            f"the checkpoint has the state of an outer optimizer {saved['class']}, this one is "
            f"{type(optimizer).__name__}",
            "Give the same outer, or load the model alone: strategy.load({'model': ...}).",
        )
    for name, values in saved["state"].items():
        if name not in named:
            continue
        parameter = named[name]
        for key, value in values.items():
            whole = isinstance(value, Tensor) and value.dim()
            if whole and value.shape != parameter.shape:
                raise UserError(
                    f"the outer optimizer's {key!r} of {name} is {tuple(value.shape)} in the "
                    f"checkpoint, and the parameter is {tuple(parameter.shape)}",
                    "Build model and outer optimizer as they were when it was written.",
                )
        optimizer.state[parameter] = {
            key: value.to(dtype=parameter.dtype if value.dim() else value.dtype).clone()
            if isinstance(value, torch.Tensor)
            else value
            for key, value in values.items()
        }
    move_state(optimizer)
