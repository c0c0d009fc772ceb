"""What the graph of a loss says of how it was computed."""

from __future__ import annotations

import torch
from torch import Tensor

from spartito.engine.losses.autograd_graph import factor


def test_a_factor_is_what_a_product_does_not_learn() -> None:
    one, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    given = torch.tensor([2.0, 3.0])

    def found(result: Tensor) -> Tensor | None:
        assert result.grad_fn is not None
        return factor(result.grad_fn)

    for product in (given * one, one * given):
        multiplied = found(product)
        assert multiplied is not None
        assert torch.equal(multiplied, given)
    assert found(one * other) is None
    assert found(one + given) is None
