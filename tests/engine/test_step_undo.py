"""Buffers after a step that is made again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spartito.engine.modules.step_undo import LARGE, Undo


class Statistics(nn.Module):
    """Buffers as modules have them: written by kernels, in place, replaced, new, and large."""

    plain: Tensor
    replaced: Tensor
    large: Tensor
    later: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3).double()
        self.register_buffer("plain", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(3), persistent=False)
        self.register_buffer("large", torch.zeros(LARGE))
        self.register_buffer("later", None)

    def forward(self, x: Tensor) -> Tensor:
        self.plain += 1
        self.replaced = 0.9 * self.replaced + x.detach().mean(0)
        if len(x) > 4:
            self.large[0] += 1
            self.later = self.replaced.clone()
        out: Tensor = self.norm(x)
        return out


def values(model: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}": None if buffer is None else buffer.clone()
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
    }


def test_what_a_step_has_done_to_buffers_is_undone() -> None:
    model, generator = Statistics(), torch.Generator().manual_seed(1)
    undo, done = Undo(model), values(model)
    for step, rows in enumerate((4, 5, 4, 6, 5)):
        before = values(model)
        batches = torch.randn(2, rows, 3, generator=generator, dtype=torch.float64)
        for attempt in range(3):
            for batch in batches:  # of one update
                undo.begin(looks=step == 0)
                model(batch)
            after = values(model)
            if attempt < 2:
                undo.undo()
                torch.testing.assert_close(values(model), before, rtol=0, atol=0)
            else:
                torch.testing.assert_close(after, done, rtol=0, atol=0)
            done = after
        undo.end()
    assert model.plain[0] == 10
    undo.undo()  # no step is under way
    torch.testing.assert_close(values(model), done, rtol=0, atol=0)
