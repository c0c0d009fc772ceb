"""Codes of fewer bits: what they leave out is bounded, and comes at a later meeting."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spartito.collectives.collective import Collective, IdentityCollective
from spartito.engine.gradients.codes import Quantized, Rounded, TopK
from spartito.errors import UserError
from spartito.outer.delta_exchange import Compressed, Whole, choose

CODES: dict[str, Any] = {
    "bf16": Rounded(),
    "8bit": Quantized(8),
    "4bit": Quantized(4),
    "4bit of 7": Quantized(4, 8),
    "topk": TopK(0.1, 32),
}
values = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=600)


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
@settings(max_examples=60, deadline=None)
@given(numbers=values)
def test_what_is_left_out_is_bounded(code: Any, numbers: list[float]) -> None:
    given_values = torch.tensor(numbers)
    packed = code.pack(given_values)
    found = code.unpack(packed, len(numbers))
    assert packed.dtype == torch.uint8
    assert found.shape == given_values.shape
    left = (given_values - found).abs()
    if isinstance(code, Rounded):
        assert (left <= given_values.abs() / 256 + 1e-38).all()
        return
    for start in range(0, len(numbers), code.block):
        part, rest = given_values[start:][: code.block], left[start:][: code.block]
        largest = float(part.abs().max())
        if isinstance(code, Quantized):
            step = largest / (2 ** (code.bits - 1) - 1) * (1 + 2**-8)
            assert float(rest.max()) <= step / 2 + largest * 2**-8 + 1e-38
        else:
            kept = min(len(part), max(1, round(code.fraction * code.block)))
            smallest = float(part.abs().sort(descending=True).values[kept - 1])
            assert float(rest.max()) <= max(smallest, largest / 256) + 1e-38  # as above


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_torchs_default_dtype_changes_nothing(code: Any) -> None:
    given_values = torch.randn(300, generator=torch.Generator().manual_seed(1))
    expected = code.unpack(code.pack(given_values), 300)
    torch.set_default_dtype(torch.float64)
    try:
        found = code.unpack(code.pack(given_values), 300)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_what_is_not_finite_does_not_disappear(code: Any) -> None:
    for wrong in (math.nan, math.inf):
        given_values = torch.tensor([1.0, wrong, *[0.5] * 40])
        assert not code.unpack(code.pack(given_values), 42).isfinite().all()
    for numel in (300, 0):  # a task with a shard of the model may have none of a fragment
        zeros = torch.zeros(numel)
        assert torch.equal(code.unpack(code.pack(zeros), numel), zeros)


def test_bytes() -> None:
    numel = 269_322
    sizes = {name: len(CODES[name].pack(torch.ones(numel))) for name in ("bf16", "8bit", "4bit")}
    whole = 4 * numel
    assert sizes["bf16"] * 2 == whole
    assert whole / sizes["8bit"] > 3.9
    assert 20 * whole / sizes["4bit"] > 150  # with a meeting after each twentieth update
    assert whole / len(TopK(0.01).pack(torch.ones(numel))) > 95


@pytest.mark.parametrize("wrong", ["4bits", "topk:0", "topk:2", "topk:x", "powersgd", 4, ""])
def test_unknown_codes_are_refused(wrong: Any) -> None:
    with pytest.raises(UserError, match="compress="):
        choose(wrong)


class Exchanging(IdentityCollective):
    """One of two threads that gather."""

    def __init__(self, rank: int, table: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.world_size, self._table, self._barrier_ = rank, 2, table, barrier

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._table[self.rank] = tensor.clone()
        self._barrier_.wait(10)
        found = [each.clone() for each in self._table]
        self._barrier_.wait(10)
        return found


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_what_was_left_out_comes_later(code: Any) -> None:
    """Two groups move by the same each time: in sum that arrives, to what is left out at last."""
    generator = torch.Generator().manual_seed(1)
    moves = [torch.randn(100, generator=generator, dtype=torch.float64) for _ in range(2)]
    shares, meetings = (3.0, 1.0), 30
    table: list[Any] = [None, None]
    barrier = threading.Barrier(2)
    totals: list[Tensor] = [torch.zeros(100), torch.zeros(100)]
    exchanges = [Compressed(code) for _ in range(2)]

    def lead(rank: int) -> None:
        group = Exchanging(rank, table, barrier)
        total = torch.zeros(100, dtype=torch.float64)
        for _ in range(meetings):
            numbers = torch.tensor([shares[rank], 0.0], dtype=torch.float64)
            moved = moves[rank].clone()
            exchanges[rank].add(moved, numbers, group)
            assert numbers[0] == 4
            total += moved / numbers[0]
        totals[rank] = total

    threads = [threading.Thread(target=lead, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert torch.equal(*totals)  # bit by bit: leaders go on from the same
    left = (3 * exchanges[0].error + exchanges[1].error) / 4
    whole = meetings * (3 * moves[0] + moves[1]) / 4
    assert torch.allclose(totals[0] + left, whole, rtol=0, atol=1e-9)
    assert float(left.norm()) < 0.5 * float(whole.norm())


def test_a_group_without_examples_keeps_what_it_has_left_out() -> None:
    exchange, alone = Compressed(Quantized(4)), IdentityCollective()
    exchange.add(torch.randn(50), torch.tensor([2.0], dtype=torch.float64), alone)
    before = exchange.error.clone()
    moved = torch.ones(50)
    exchange.add(moved, torch.tensor([0.0], dtype=torch.float64), alone)
    assert torch.equal(exchange.error, before)
    assert torch.equal(moved, torch.zeros(50))


def test_all_bits_are_a_weighted_sum() -> None:
    group: Collective = IdentityCollective()
    moved, numbers = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0], dtype=torch.float64)
    assert Whole().add(moved, numbers, group) == 0
    assert moved.tolist() == [3.0, 6.0]
    exchange = Whole()
    exchange.error = torch.tensor([0.5, 0.0])  # of a checkpoint that was written with a code
    for expected in ([4.5, 6.0], [3.0, 6.0]):
        moved = torch.tensor([1.0, 2.0])
        exchange.add(moved, torch.tensor([3.0], dtype=torch.float64), group)
        assert moved.tolist() == expected
