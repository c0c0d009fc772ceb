"""A step of the user's own inside of `fit`: a function of the model and a batch, to the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import nn

from spartito.engine.losses.loss import LossFunction
from spartito.engine.updates.optimizers import OWN_LOOP, Wrapper
from spartito.errors import UserError
from spartito.strategies import Strategy

StepFunction: TypeAlias = Callable[[nn.Module, Any], Any]
"""``(model, batch)`` to the loss, in any of the forms that a model which computes its own returns:
a mean over the examples, one for each, ``(sum, weight)``, or ``{"loss": ..., "output": ...}``."""


class CustomStep(Wrapper):
    """A model that is called as its user's functions call it.

    Args:
        module: The user's model.
        train_step: What a step of the training computes.
        eval_step: What a step of an evaluation computes.
    """

    takes_batches = True

    def __init__(
        self, module: nn.Module, train_step: StepFunction, eval_step: StepFunction
    ) -> None:
        super().__init__(module)
        self._train_step, self._eval_step = train_step, eval_step
        self._steps = False

    def forward(self, *parts: Any, **named: Any) -> Any:
        """The loss of a batch in a step of the trainer, else the model's output."""
        if not self._steps:
            return self.module(*parts, **named)
        batch = named or (parts if len(parts) > 1 else parts[0])
        name, step = (
            ("train_step", self._train_step) if self.training else ("eval_step", self._eval_step)
        )
        found = step(self.module, batch)
        if found is None:
            raise UserError(
                f"{name} returned None, and no loss",
                f"Return it: fit makes the backward pass and the update. {OWN_LOOP}",
            )
        return found

    @contextmanager
    def stepping(self, steps: bool) -> Iterator[None]:
        """A block in which a call is a step, or one in which it is none.

        Args:
            steps: Which of them.
        """
        before, self._steps = self._steps, steps
        try:
            yield
        finally:
            self._steps = before


def custom_step(
    model: nn.Module,
    train_step: StepFunction | None,
    eval_step: StepFunction | None,
    loss: LossFunction | None,
    strategy: Strategy,
) -> CustomStep | None:
    """The model with its user's functions; None without any.

    Args:
        model: The user's model.
        train_step: As under `spartito.Trainer`.
        eval_step: Likewise.
        loss: The trainer's.
        strategy: Under which it trains.

    Raises:
        UserError: They do not go with each other, or with the strategy.
    """
    for name, given in (("train_step", train_step), ("eval_step", eval_step)):
        if given is not None and not callable(given):
            raise UserError(f"{name}={given!r} is no function", "Give a function (model, batch).")
    if train_step is None:
        if eval_step is not None:
            raise UserError("eval_step without train_step", "Give both, or loss= alone.")
        return None
    if loss is not None:
        raise UserError("train_step and loss", "train_step computes the loss: leave loss= out.")
    if strategy.engine.parts.placement.account.hides_outputs:
        raise UserError(
            f"train_step under {strategy}, which cuts the model's forward()",
            "Choose another strategy, or compute the loss in forward() or by loss=.",
        )
    return CustomStep(model, train_step, train_step if eval_step is None else eval_step)
