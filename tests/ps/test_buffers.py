"""Copies are made in memory that is there, and are copies all the same."""

from __future__ import annotations

import torch

from spartito.ps.server.buffers import BufferPool


def test_a_copy_is_made_in_the_memory_of_the_last_one() -> None:
    buffers, tensors = BufferPool(), {"a": torch.arange(5.0), "b": torch.tensor(3)}
    first = buffers.copy(tensors)
    where = {name: copy.data_ptr() for name, copy in first.items()}
    buffers.give_back(first)
    tensors["a"] += 1
    again = buffers.copy(tensors)
    assert {name: copy.data_ptr() for name, copy in again.items()} == where
    assert again["a"].tolist() == [1, 2, 3, 4, 5]


def test_copies_that_are_in_use_stay() -> None:
    buffers, tensors = BufferPool(), {"a": torch.zeros(3)}
    one = buffers.copy(tensors)
    tensors["a"] += 1
    other = buffers.copy(tensors)
    assert (one["a"].tolist(), other["a"].tolist()) == ([0, 0, 0], [1, 1, 1])


def test_memory_that_does_not_fit_is_left() -> None:
    buffers = BufferPool()
    buffers.give_back(buffers.copy({"a": torch.zeros(3), "gone": torch.ones(1)}))
    wide = torch.arange(6, dtype=torch.float64).reshape(2, 3).t()
    found = buffers.copy({"a": wide, "new": torch.ones(2)})
    assert torch.equal(found["a"], wide)
    assert found["a"].stride() == wide.stride()
    assert set(found) == {"a", "new"}
