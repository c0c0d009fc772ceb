"""Copies are made in memory that is there, and are copies all the same."""

from __future__ import annotations

import torch

from spartito.ps.server.buffers import Spare


def test_a_copy_is_made_in_the_memory_of_the_last_one() -> None:
    spare, tensors = Spare(), {"a": torch.arange(5.0), "b": torch.tensor(3)}
    first = spare.copy(tensors)
    where = {name: copy.data_ptr() for name, copy in first.items()}
    spare.give_back(first)
    tensors["a"] += 1
    again = spare.copy(tensors)
    assert {name: copy.data_ptr() for name, copy in again.items()} == where
    assert again["a"].tolist() == [1, 2, 3, 4, 5]


def test_copies_that_are_in_use_stay() -> None:
    spare, tensors = Spare(), {"a": torch.zeros(3)}
    one = spare.copy(tensors)
    tensors["a"] += 1
    other = spare.copy(tensors)
    assert (one["a"].tolist(), other["a"].tolist()) == ([0, 0, 0], [1, 1, 1])


def test_memory_that_does_not_fit_is_left() -> None:
    spare = Spare()
    spare.give_back(spare.copy({"a": torch.zeros(3), "gone": torch.ones(1)}))
    wide = torch.arange(6, dtype=torch.float64).reshape(2, 3).t()
    found = spare.copy({"a": wide, "new": torch.ones(2)})
    assert torch.equal(found["a"], wide)
    assert found["a"].stride() == wide.stride()
    assert set(found) == {"a", "new"}
