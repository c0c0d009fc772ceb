"""A batch size is found by trials: in the memory that is free, and nothing is changed by them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import spartito as sp
from spartito.data.batch import Batch
from spartito.errors import UserError
from spartito.training.trials.batch_size_finder import Growth, Memory, Wish, lacks, slower
from tests.processes import context
from tests.replicas import ReplicaError, Replicas
from tests.strategies import step_jobs
from tests.strategies.jobs import blobs, mlp
from tests.strategies.test_contracts import Case, each_of
from tests.strategies.test_custom_step import CASES


@each_of([case for case in CASES if case[0] != "parameter_server"])
def test_nothing_is_changed(replicas: Replicas, case: Case) -> None:
    name, count, options = case
    first, *others = replicas(step_jobs.find_size, count, name, options)
    assert first["moved"] == 0
    assert not first["drew"]
    assert not first["modes"]
    assert first["again"] == pytest.approx(step_jobs.fitted_twice(), abs=1e-12)
    found = first["found"]
    assert found.sizes == [4, 8, 16]
    assert found.suggestion in found.sizes
    assert found.reason.endswith("high=16 ends the search")
    assert all(rate > 0 for rate in found.rates)
    assert all(other["found"] == found for other in others)


def find_in(*given: int) -> dict[str, Any]:
    """A search in a process of its own, whose peak of memory is that of nothing else."""
    with ProcessPoolExecutor(1, mp_context=context) as processes:
        return processes.submit(step_jobs.find_size_in, *given).result()


def test_it_ends_before_memory_does() -> None:
    found = find_in(400)
    sizes, reason = found["found"].sizes, found["found"].reason
    assert len(sizes) > 1
    assert sizes[-1] < 400  # of 4 MiB each, and their gradients
    assert "may not fit: it may need" in reason
    assert found["took"] < 400 << 20
    assert not found["moved"]


def test_an_allocation_that_fails_ends_it_too() -> None:
    found = find_in(1 << 40, 1500)
    assert found["found"].reason.split(": ")[1].startswith("memory ran out at ")
    assert not found["moved"]
    assert not found["left"]


@given(
    fixed=st.integers(0, 1000),
    each=st.integers(0, 100),
    older=st.integers(0, 20_000),
    below=st.integers(0, 1000),
)
def test_what_is_computed_is_never_too_little(
    fixed: int, each: int, older: int, below: int
) -> None:
    """Whatever had more in use before, and whatever of the fixed part came with the first step."""
    used = max(0, fixed - below)
    growth = Growth(Memory("ram", used, max(older, used), math.inf))
    for size in (2, 4, 8, 16):
        peak = max(growth.peaks[-1], fixed + each * size)
        wish = growth.wish(Memory("ram", fixed, peak, math.inf))
        assert fixed + wish.more >= fixed + each * 2 * size
        assert wish.grown - wish.more == fixed - used
        assert not lacks([wish])
    if each and older <= fixed:
        assert wish.more == each * 32  # and no more than that


def test_tasks_of_one_pool_share_its_memory() -> None:
    def wish(pool: str, more: float, grown: float, free: float = 90.0) -> Wish:
        return Wish(pool, more, free, grown, 200.0)

    assert lacks([wish("a", 50, 100, 100.0), wish("a", 40, 100)]) == ""
    assert lacks([wish("a", 50, 100), wish("a", 41, 100)]) == "it may need 91 B, of 90 B"
    assert lacks([wish("a", 50, 100), wish("a", 40, 101)]) == "it may need 201 B, of 200 B"
    assert lacks([wish("a", 90, 200), wish("b", 90, 200)]) == ""
    assert lacks([wish("a", 90, 200), wish("b", 91, 200)]) == "it may need 91 B, of 90 B"


def test_two_in_a_row_that_are_no_quicker_end_it() -> None:
    rates = [100.0, 200.0, 180.0, 215.0, 221.0, 190.0]
    assert [slower(rates[:n], 0.05) for n in range(1, 7)] == [False] * 5 + [True]


class Slow(nn.Module):
    """One whose step takes the time of its rows alone, in products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.large = nn.Linear(2, 2), torch.ones(200, 200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(len(x)):
            self.large @ self.large
        found: torch.Tensor = self.layer(x)
        return found


def trainer(net: nn.Module | None = None, **options: Any) -> sp.Trainer:
    options = {"optimizer": step_jobs.tuned, "strategy": "one_device", **options}
    return sp.Trainer(net or mlp(), loss=nn.CrossEntropyLoss(), **options)


def test_a_line_says_what_was_chosen_and_why(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(600, 2)
    found = trainer(Slow()).find_batch_size((x, x), steps=2)
    assert [b / a for a, b in pairwise(found.sizes)] == [2] * (len(found.sizes) - 1)
    assert f"batch size {found.reason}" in [record.message for record in caplog.records]
    assert found.reason.startswith(f"{found.suggestion}, with ")
    best = max(found.rates)
    quick = [n for n, rate in zip(found.sizes, found.rates, strict=True) if rate * 1.05 >= best]
    assert found.suggestion == quick[0]


def test_the_examples_are_enough() -> None:
    found = trainer().find_batch_size(blobs(10), low=3, steps=1)
    assert found.sizes[0] == 3
    assert found.sizes[-1] <= 10
    found = trainer(accumulate=3).find_batch_size(blobs(10), low=10, steps=1)
    assert found.sizes == [10]
    assert found.reason.endswith("the number of examples=10 ends the search")


def test_what_cannot_be_searched_is_refused(replicas: Replicas) -> None:
    def stream() -> Iterator[Batch]:
        yield from ()

    data = blobs(8)
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (stream(), {}, "of a BatchStream"),
        (data, {"low": 9}, r"low=9, high=8.* with 8 examples"),
        (data, {"low": 0}, "low=0"),
        (data, {"low": 4, "high": 2}, "low=4, high=2"),
        (data, {"steps": 0}, "steps=0"),
        (data, {"memory": 0.0}, "memory=0.0"),
        (data, {"gain": -1.0}, "gain=-1.0"),
    ]
    for given_, options, message in wrong:
        with pytest.raises(UserError, match=message):
            trainer().find_batch_size(given_, **options)
    with pytest.raises(UserError, match="without an optimizer"):
        trainer(optimizer=None).find_batch_size(data)
    with pytest.raises(ReplicaError, match=r"find_batch_size under parameter_server.* do not meet"):
        replicas(step_jobs.find_on_servers, 2, {}, servers=1)


def test_an_error_of_the_model_is_its_own() -> None:
    class Breaks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 4:
                raise RuntimeError("mine")
            return super().forward(x)

    net = Breaks(6, 4).double()
    before = net.weight.clone()
    with pytest.raises(RuntimeError, match="mine"):
        trainer(net).find_batch_size(blobs(20), steps=1)
    assert torch.equal(net.weight, before)
