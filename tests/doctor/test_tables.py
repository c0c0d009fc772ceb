"""What the doctor prints of a cluster: tables, rounds and numbers."""

from __future__ import annotations

from itertools import combinations, permutations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from spartito.doctor.findings import (
    Speed,
)
from spartito.doctor.probe.coordinator import rounds
from spartito.doctor.report import grids
from spartito.doctor.wording import amount, joined
from tests.doctor.test_rules import GIB, HEALTHY, W0, W1, W2, facts, report


def test_tables_have_a_row_per_task_and_say_who_is_not_there() -> None:
    given = report(facts(W0), facts(W1))
    tasks, machines, matrix = grids(given)
    assert [row[0] for row in tasks.rows] == [W0, W1, W2]
    assert tasks.rows[2][2] == "did not come"
    assert tasks.marked == {(2, 2)}
    assert [row[0] for row in machines.rows] == [W0, W1]
    assert "eth0 10.0.0.1" in tasks.rows[0]
    assert matrix.rows[0][1] == ""
    assert matrix.rows[0][2] == "200 µs\n1.0 GB/s"
    for grid in grids(given):
        assert all(len(row) == len(grid.heads) for row in grid.rows)


def test_of_many_tasks_the_slowest_ways_are_listed() -> None:
    names = [f"worker {i}" for i in range(12)]
    pairs = list(permutations(names, 2))
    speeds = [Speed(*pair, 1e-4, 1e9 + index, 0.0) for index, pair in enumerate(pairs)]
    many = {name: msgspec.structs.replace(HEALTHY, task=name) for name in names}
    given = report(
        expected=names, addresses=dict.fromkeys(names, ""), facts=many, speeds=speeds, probes=[]
    )
    slowest = grids(given)[2]
    assert slowest.rows[0][0] == "worker 0 to worker 1"
    assert len(slowest.rows) == 10


@given(st.integers(2, 40))
def test_rounds_hold_every_pair_once_and_no_task_twice_in_one(count: int) -> None:
    tasks = [str(number) for number in range(count)]
    seen = []
    for pairs in rounds(tasks):
        at_work = [task for pair in pairs for task in pair]
        assert len(at_work) == len(set(at_work))
        seen += [frozenset(pair) for pair in pairs]
    assert len(seen) == len(set(seen))
    assert set(seen) == {frozenset(pair) for pair in combinations(tasks, 2)}


def test_numbers_in_words() -> None:
    assert [amount(0), amount(1536), amount(3 * GIB)] == ["0 B", "1.5 KiB", "3 GiB"]
    assert joined([str(n) for n in range(9)]) == "0, 1, 2, 3, 4 and 4 more"
