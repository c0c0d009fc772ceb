"""What is written into parameters that servers hold is noticed, of whatever type they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spartito.errors import UserError
from spartito.ps.client.pulled_values import PulledValues
from spartito.ps.client.vector import Vector

TYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_change_of_one_element_is_named(dtype: torch.dtype) -> None:
    net = torch.nn.Linear(3, 2, dtype=dtype)
    vector = Vector(net, torch.optim.SGD(net.parameters(), 0.1))
    pulled = PulledValues(vector, "worker 0")
    pulled.note()
    pulled.check()
    with torch.no_grad():
        net.bias[1] += 1
    with pytest.raises(UserError, match="bias of the model changed on worker 0"):
        pulled.check()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("change", [torch.neg, lambda values: values.flip(0)], ids=["neg", "flip"])
def test_so_is_one_that_leaves_a_sum_as_it_was(dtype: torch.dtype, change: Any) -> None:
    net = torch.nn.Linear(3, 8, dtype=dtype)
    pulled = PulledValues(Vector(net, torch.optim.SGD(net.parameters(), 0.1)), "worker 0")
    pulled.note()
    with torch.no_grad():
        net.bias.copy_(change(net.bias))
    with pytest.raises(UserError, match="bias of the model changed on worker 0"):
        pulled.check()
