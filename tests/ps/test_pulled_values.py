"""What is written into parameters that servers hold is noticed, of whatever type they are."""

from __future__ import annotations

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
