"""Delay compensation: a stale gradient becomes about what it would be of the newest values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from spartito.errors import UserError
from spartito.ps.protocol.memory import allocate
from spartito.ps.protocol.rules import Rules
from spartito.ps.server.shard import Shard

EPSILON = 1e-7
MEANS = "means"
"""What `Compensation.state` calls the means of squares."""


class Compensation(Protocol):
    """What becomes of gradients before they are applied."""

    def take(
        self, push: Tensor, pulled: Tensor | None, absent: Sequence[int], staleness: int
    ) -> None:
        """Change the gradients in ``push``, in place; its worker had the values ``pulled``."""

    def state(self) -> dict[str, Tensor]:
        """What a server that is started again goes on from."""
        ...

    def restore(self, means: Tensor | None) -> None:
        """Go on from what `state` has; None begins anew."""


class NoCompensation:
    """Gradients stay as they are."""

    def take(
        self, push: Tensor, pulled: Tensor | None, absent: Sequence[int], staleness: int
    ) -> None:
        """Nothing changes."""

    def state(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def restore(self, means: Tensor | None) -> None:
        """There is nothing."""


class DelayCompensation:
    """DC-ASGD (Zheng et al. 2017, arXiv:1609.08326): ``g + s * g * g * (now - pulled)``.

    The squares stand for the diagonal of the Hessian: it is the gradient's Taylor expansion. It
    is for what is staler than the rules' bound; ``strength`` is s. With ``mean_square``, a decay,
    it is ``strength / sqrt(mean + 1e-7)`` for each element, where the mean of its squared
    gradients, stale or not, is a moving one that begins with the first that is not 0.
    """

    def __init__(self, rules: Rules, shard: Shard) -> None:
        self._shard, self._limit = shard, rules.max_staleness or 0
        self._strength, self._decay = rules.strength, rules.mean_square
        self._means = None if self._decay is None else allocate(shard.span)

    def take(
        self, push: Tensor, pulled: Tensor | None, absent: Sequence[int], staleness: int
    ) -> None:
        """As `Compensation.take`."""
        self._note(push, absent)
        if pulled is None or staleness <= self._limit:
            return
        means = () if self._means is None else (self._means,)
        memories = (push, pulled, self._shard.values, *means)
        for gradient, before, now, *mean in self._shard.learned(absent, *memories):
            moved = (now - before).mul_(gradient)
            if mean:
                moved.div_((mean[0] + EPSILON).sqrt_())
            gradient.addcmul_(gradient, moved, value=self._strength)

    def state(self) -> dict[str, Tensor]:
        """A copy of the means, if there are some."""
        return {} if self._means is None else {MEANS: self._means.clone()}

    def restore(self, means: Tensor | None) -> None:
        """As `Compensation.restore`."""
        if self._means is not None:
            self._means.zero_() if means is None else self._means.copy_(means)

    def _note(self, push: Tensor, absent: Sequence[int]) -> None:
        if self._means is None or self._decay is None:
            return
        for gradient, mean in self._shard.learned(absent, push, self._means):
            squares = gradient * gradient
            mixed = mean.lerp(squares, 1 - self._decay)
            mean.copy_(torch.where(mean == 0, squares, mixed))


def check_compensation(rules: Rules, dtypes: Iterable[str]) -> None:
    """Raise `UserError` where parameters of ``dtypes`` have no squares that stand for a Hessian."""
    wrong = [dtype for dtype in dtypes if dtype.startswith("complex")]
    if wrong and rules.on_stale == "compensate":
        raise UserError(
            f"on_stale='compensate' with parameters of dtype {wrong[0]}",
            "It is for real numbers: choose another on_stale.",
        )


def compensation_of(rules: Rules, shard: Shard) -> Compensation:
    """What the rules ask for."""
    if rules.on_stale == "compensate":
        return DelayCompensation(rules, shard)
    return NoCompensation()
