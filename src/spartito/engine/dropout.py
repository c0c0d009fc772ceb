"""Dropout whose masks are drawn for the global batch, so that any split draws the same ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spartito.engine.context import StepContext, current
from spartito.errors import UserError


class GlobalDropout(nn.Dropout):
    """`nn.Dropout` that takes its rows of a mask drawn from (seed, step, module, call).

    Outside of a step it is plain `nn.Dropout`. ``number`` tells the modules of a model apart.
    """

    number: int

    def forward(self, input: Tensor) -> Tensor:
        """Zero with probability p and scale the rest, shape ``(batch, ...)`` kept."""
        context = current()
        if context is None or not self.training or self.p == 0.0 or not len(context.places):
            return super().forward(input)
        keep = 1.0 - self.p
        mask = self._uniform(context, input) < keep
        scale = 1.0 / keep if keep else 0.0
        return input * mask.to(device=input.device, dtype=input.dtype).mul_(scale)

    def _uniform(self, context: StepContext, input: Tensor) -> Tensor:
        call = context.calls.get(self.number, 0)
        context.calls[self.number] = call + 1
        generator = torch.Generator()
        generator.manual_seed(hash((context.seed, context.step, self.number, call)) % 2**63)
        here = len(context.places)
        if here and input.shape[0] % here:
            raise UserError(
                f"dropout of {input.shape[0]} rows for {here} examples, deterministic",
                "The first dim holds the examples, or a whole number of rows for each.",
            )
        rows = input.shape[0] // here if here else 1
        shape = (context.global_size, rows, *input.shape[1:])
        drawn = torch.rand(shape, generator=generator)[context.places]
        return drawn.flatten(0, 1)


def globalize_dropout(model: nn.Module) -> None:
    """Make every `nn.Dropout` of ``model`` a `GlobalDropout`, in place.

    Names, state and ``isinstance(module, nn.Dropout)`` stay as they are.
    """
    for number, module in enumerate(model.modules()):
        if type(module) is nn.Dropout:
            module.__class__ = GlobalDropout
            module.__dict__["number"] = number
