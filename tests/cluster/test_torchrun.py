from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.cluster import ClusterSpec, Task
from spartito.cluster.torchrun import from_torchrun
from spartito.errors import UserError

GOOD = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_without_a_rank_it_says_nothing() -> None:
    assert from_torchrun({}) is None
    assert from_torchrun({"MASTER_ADDR": "a", "MASTER_PORT": "1"}) is None


def test_the_variables_are_one_cluster() -> None:
    assert from_torchrun(GOOD) == ClusterSpec(
        addresses={"worker": ("10.0.0.1:29500", "", "", "")},
        task=Task("worker", 3),
        rank=3,
        world_size=4,
        local_rank=1,
        local_size=2,
        rendezvous="10.0.0.1:29500",
        source="torchrun's variables",
    )


def test_an_ipv6_master_gets_its_brackets() -> None:
    spec = from_torchrun(GOOD | {"MASTER_ADDR": "fe80::1"})
    assert spec is not None
    assert spec.rendezvous == "[fe80::1]:29500"


@pytest.mark.parametrize("missing", list(GOOD))
def test_a_missing_variable_is_named(missing: str) -> None:
    with pytest.raises(UserError, match=f"{missing} is not"):
        from_torchrun({name: value for name, value in GOOD.items() if name != missing})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "4"}, "RANK=4"),
        ({"RANK": "-1"}, "RANK='-1'"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"WORLD_SIZE": "0"}, "RANK=3"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2"),
        ({"RANK": "0"}, "LOCAL_RANK=1"),
        ({"LOCAL_WORLD_SIZE": "5", "LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE=5"),
        ({"LOCAL_RANK": "0"}, "local rank 0 of 2"),
        ({"MASTER_PORT": "0"}, "'0'"),
        ({"MASTER_ADDR": "a b"}, "'a b:29500'"),
    ],
)
def test_what_does_not_fit_together_is_named(change: dict[str, str], words: str) -> None:
    with pytest.raises(UserError) as error:
        from_torchrun(GOOD | change)
    assert words in str(error.value)


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_every_rank_of_a_job_is_read(nodes: int, size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, nodes * size - 1))
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": nodes * size,
        "LOCAL_RANK": rank % size,
        "LOCAL_WORLD_SIZE": size,
    }
    spec = from_torchrun(GOOD | {name: str(value) for name, value in numbers.items()})
    assert spec is not None
    assert (spec.rank, spec.world_size) == (rank, nodes * size)
    assert (spec.local_rank, spec.local_size) == (rank % size, size)
    assert spec.is_chief == (rank == 0)
    assert (spec.rendezvous is None) == (nodes * size == 1)
