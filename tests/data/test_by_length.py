"""Batches of examples of like length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spartito as sp
from spartito.data.reading.loader import Loader
from spartito.data.reading.order import by_length, permutation
from spartito.errors import UserError


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=700), st.integers(1, 9), st.integers(0, 99)
)
def test_each_example_comes_once(lengths: list[int], batch: int, seed: int) -> None:
    known, count = np.array(lengths, dtype=np.float64), len(lengths)
    order = by_length(permutation(count, seed, 1), known, batch, seed, 1)
    assert sorted(order.tolist()) == [*range(count)]
    assert order.tolist() == by_length(permutation(count, seed, 1), known, batch, seed, 1).tolist()
    whole = count // batch
    for start in range(0, whole * batch, batch):
        part = known[order[start : start + batch]]
        assert (np.diff(part) <= 0).all()


def test_little_is_filled_up_and_order_is_drawn() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 2000)
    rows = sp.data.arrays(torch.from_numpy(lengths)[:, None])
    both = {"plain": rows.shuffle().batch(16), "grouped": rows.shuffle(lengths=lengths).batch(16)}
    filled = {}
    for name, data in both.items():
        longest = [batch.data.amax() for batch in Loader(data, (0, 1), 0)]
        filled[name] = float(sum(longest) * 16 / lengths.sum())
    assert filled["grouped"] < 1.05 < 1.5 < filled["plain"]
    firsts = [next(iter(Loader(both["grouped"], (0, 1), seed))).data[0].item() for seed in range(9)]
    assert len(set(firsts)) > 4  # neither the longest nor the shortest comes first


def test_lengths_that_are_none() -> None:
    data: Any = sp.data.arrays(torch.arange(5))
    for lengths in ([1, 2], [[1] * 5], ["a"] * 5):
        with pytest.raises(UserError, match="one number for each example"):
            data.shuffle(lengths=lengths)
