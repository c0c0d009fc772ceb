"""Every operation of `torch.distributed` gives what a pure function of the ranks' values says."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spartito.collectives.arithmetic import arithmetic
from tests.backend import jobs
from tests.backend.operations import (
    COMPLEX,
    FLOATS,
    LAYOUTS,
    MOVING,
    REDUCING,
    SHAPES,
    START,
    WHOLE,
    Step,
)
from tests.replicas import Replicas
from tests.skips import shares_memory

NUMBERS = (*FLOATS, *WHOLE)
ORDERED = ("SUM", "PRODUCT", "MIN", "MAX", "AVG")
BITWISE = ("BAND", "BOR", "BXOR")
BACKENDS = [
    (2, "spartito"),
    (3, "spartito"),
    (2, "spartito on ab"),
    (3, "spartito on abc"),
    (3, "spartito on aab"),
]
TRANSPORTS = pytest.mark.parametrize(("size", "backend"), BACKENDS)


def everyone(size: int) -> tuple[int, ...]:
    return tuple(range(size))


def right(replicas: Replicas, size: int, program: list[Step], backend: str) -> None:
    """No rank has anything to say against the results."""
    assert replicas(jobs.steps, size, backend, program) == [[]] * size


@TRANSPORTS
def test_reductions_of_every_type(replicas: Replicas, size: int, backend: str) -> None:
    program = [
        Step(kind, everyone(size), dtype, op, root=size - 1)
        for kind, dtype, op in product(REDUCING, NUMBERS, (*ORDERED, *BITWISE))
        if not (op in BITWISE and dtype.is_floating_point)
    ]
    right(replicas, size, program, backend)


def test_a_mean_of_whole_numbers_is_cut_off() -> None:
    values = np.array([-7, -6, 6, 7])
    arithmetic("AVG", torch.int64).divide(values.view(np.uint8), 2.0)
    assert values.tolist() == [-3, -3, 3, 3]


@pytest.mark.parametrize("backend", ["gloo", "spartito", "spartito on ab"])
def test_shapes_may_differ_between_ranks(replicas: Replicas, backend: str) -> None:
    one, other = replicas(jobs.reshaped, 2, backend)
    assert one == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
    assert other == [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]


@TRANSPORTS
def test_moves_of_every_type(replicas: Replicas, size: int, backend: str) -> None:
    program = [
        Step(kind, everyone(size), dtype, root=size - 1)
        for kind, dtype in product(MOVING, (*NUMBERS, *COMPLEX, torch.bool))
    ]
    right(replicas, size, program, backend)


@pytest.mark.parametrize(("size", "backend"), [BACKENDS[1], *BACKENDS[3:]])
@pytest.mark.slow
def test_every_shape_and_layout(replicas: Replicas, size: int, backend: str) -> None:
    program = [
        Step(kind, everyone(size), shape=shape, layout=layout, seed=1)
        for kind, shape, layout in product(START, SHAPES, LAYOUTS)
    ]
    right(replicas, size, program, backend)


@st.composite
def programs(draw: st.DrawFn, size: int) -> list[Step]:
    """Operations of any kind in groups that overlap, some of them waited for at the end alone."""
    members = st.sets(st.integers(0, size - 1), min_size=1).map(lambda x: tuple(sorted(x)))
    groups = draw(st.lists(members, min_size=1, max_size=4))

    def step(ranks: tuple[int, ...]) -> st.SearchStrategy[Step]:
        return st.builds(
            Step,
            kind=st.sampled_from([kind for kind in START if kind != "ring" or len(ranks) > 1]),
            members=st.just(ranks),
            dtype=st.sampled_from(NUMBERS),
            op=st.sampled_from(("SUM", "MIN", "MAX")),
            shape=st.sampled_from(SHAPES[:-1]),
            layout=st.sampled_from(LAYOUTS),
            root=st.integers(0, len(ranks) - 1),
            is_async=st.booleans(),
            seed=st.integers(0, 5),
        )

    return draw(st.lists(st.sampled_from(groups).flatmap(step), min_size=1, max_size=25))


@settings(max_examples=25)
@given(data=st.data())
@pytest.mark.slow
def test_any_program(replicas: Replicas, data: st.DataObject) -> None:
    size, backend = data.draw(st.sampled_from([*BACKENDS, (3, "spartito on aba")]))
    right(replicas, size, data.draw(programs(size)), backend)


@pytest.mark.parametrize("backend", ["spartito", "spartito on ab"])
def test_messages_wait_for_who_reads_them_later(replicas: Replicas, backend: str) -> None:
    found = replicas(jobs.left_messages, 2, backend)
    assert found == [[4, 4, 12, 12, 11, 11], [4, 4, 2, 2, 1, 1]]


@shares_memory
def test_sums_of_two_layers_are_taken_on_each_machine_first(replicas: Replicas) -> None:
    for floats in (1000, 1_500_000):  # in one part, and in several
        parts = [jobs.noise(rank, floats) for rank in range(4)]
        wanted = jobs.digest((parts[0] + parts[2]) + (parts[1] + parts[3]))
        assert replicas(jobs.sums, 4, "spartito on abab", floats) == [[wanted] * 3] * 4
