"""What the graph of a scalar loss tells of its divisor, and where it tells nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from spartito.data.batch import Batch
from spartito.engine.loss import look, look_at_own

ce = functional.cross_entropy

SIZE, TOKENS, CLASSES = 6, 5, 4


def scores(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(SIZE, TOKENS, CLASSES, generator=generator, dtype=torch.float64)
    return made.requires_grad_() * 1.0


def labels() -> Tensor:
    found = torch.randint(CLASSES, (SIZE, TOKENS), generator=torch.Generator().manual_seed(2))
    found[1:3, 2:] = -100
    return found


def batch(*data: Any) -> Batch:
    return Batch(data, SIZE, SIZE, torch.arange(SIZE), 0, 0)


def beside_a_teacher(o: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        ce(o.flatten(0, 1), y.flatten())
    return ce(o.flatten(0, 1), y.flatten())


def test_looking_leaves_gradients_as_they_were() -> None:
    kept = float((labels() != -100).sum())
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            found = look(beside_a_teacher, scores(), batch(scores(), labels()))
            assert torch.is_grad_enabled() is enabled
        assert found.weight == kept


class Own(nn.Module):
    def forward(self, o: Tensor, y: Tensor) -> Tensor:
        return beside_a_teacher(o, y)


def test_a_teacher_inside_of_a_model_hides_no_divisor() -> None:
    with torch.no_grad():
        _, found = look_at_own(Own(), batch(scores().detach(), labels()))
        assert not torch.is_grad_enabled()
    assert found.weight == float((labels() != -100).sum())
