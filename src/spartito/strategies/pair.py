"""One model and its optimizer, as a strategy keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.engine.gradients import Accumulated, Gradients
from spartito.engine.optimizers import optimizer_parameters, unwrap
from spartito.engine.randomness import GlobalRandomness
from spartito.errors import UserError


@dataclass
class Pair:
    """A prepared model, its optimizer, and what an update of it has to do."""

    model: nn.Module
    optimizer: Optimizer
    gradients: Gradients
    accumulate: int
    clip_norm: float | None
    precision: str
    dtype: torch.dtype | None  # what floating data is cast to: that of all parameters, if one
    shared: dict[int, Tensor]  # by id: the chief's values of these have come to all replicas
    seed: int
    randomness: GlobalRandomness | None  # where training is deterministic
    passes: int = 0

    @property
    def new(self) -> list[nn.Parameter]:
        """The parameters that the optimizer has got since."""
        return [p for p in optimizer_parameters(self.optimizer) if id(p) not in self.shared]

    def accumulated(self) -> dict[str, Any]:
        """What the batches since the last update have left, equal on all replicas."""
        waiting = self.gradients.accumulated()
        grads = zip(self._names, waiting.grads, strict=True)
        return {
            "gradients": {name: grad for name, grad in grads if grad is not None},
            "divisor": waiting.loss_divisor,
            "weight": waiting.weight,
            "loss": waiting.loss,
            "batches": self.passes,
            "accumulate": self.accumulate,
        }

    def go_on_accumulating(self, saved: dict[str, Any], rank: int) -> None:
        """Take up what `accumulated` returned, under any number of replicas."""
        if saved["accumulate"] != self.accumulate:
            raise UserError(
                f"the checkpoint was written after {saved['batches']} of {saved['accumulate']} "
                f"batches of an update, and accumulate={self.accumulate} now",
                "Go on with the same, or begin a whole epoch: fit(..., initial_epoch=N).",
            )
        self.gradients.refresh()
        grads = [saved["gradients"].get(name) for name in self._names]
        waiting = Accumulated(grads, saved["divisor"], saved["weight"], saved["loss"])
        self.gradients.load_accumulated(waiting, rank)
        self.passes = saved["batches"]

    @property
    def _names(self) -> list[str]:
        """The user's names of what learns."""
        names = {id(p): name for name, p in unwrap(self.model).named_parameters()}
        return [names[id(parameter)] for parameter in self.gradients.parameters]
