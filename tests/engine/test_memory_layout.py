"""Tensors in other memory that are what one is in its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spartito.engine.devices.memory_layout import viewing


@pytest.mark.parametrize(
    "part",
    [
        lambda whole: whole[1:3].conj(),
        lambda whole: whole.t().conj().imag,
        lambda whole: whole.conj().t()[1:],
        lambda whole: whole.real,
        lambda whole: whole[2],
    ],
    ids=["conjugate", "negative", "transposed", "real", "row"],
)
def test_the_same_part_of_other_memory(part: Callable[[Tensor], Tensor]) -> None:
    """Also where torch shows the numbers in another way than they lie there, or as other ones."""
    own, other = torch.randn(2, 6, 4, dtype=torch.complex64)
    found, right = viewing(part(own))(other.clone().untyped_storage()), part(other.clone())
    assert torch.equal(found, right)
    assert (found.dtype, found.stride()) == (right.dtype, right.stride())
    assert (found.is_conj(), found.is_neg()) == (right.is_conj(), right.is_neg())
