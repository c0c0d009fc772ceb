from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spartito.cluster.spec import ClusterSpec, Task
from spartito.engine.updates.divided_update import cut
from spartito.errors import UserError
from spartito.steps.exchanges.one_copy import balanced, homeless, line_offsets
from spartito.strategies import CentralStorageStrategy
from tests.replicas import ReplicaError, Replicas
from tests.skips import shares_memory
from tests.strategies import central_jobs as jobs


@given(st.lists(st.integers(0, 1000)), st.integers(1, 5))
def test_shares_are_even_but_for_the_largest(sizes: list[int], ranks: int) -> None:
    owners = balanced(sizes, [0] * ranks)
    assert len(owners) == len(sizes)
    loads = [
        sum(n for n, owner in zip(sizes, owners, strict=True) if owner == rank)
        for rank in range(ranks)
    ]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)


@given(st.lists(st.integers(0, 1000)), st.integers(1, 5), st.integers(1, 16))
def test_elements_are_cut_evenly(sizes: list[int], ranks: int, multiple: int) -> None:
    found = cut(sizes, ranks, multiple)
    loads = [0] * ranks
    for size, spans in zip(sizes, found, strict=True):
        end = 0
        for rank, start, stop in spans:
            assert start == end < stop
            assert start % multiple == 0
            loads[rank] += stop - start
            end = stop
        assert end == size
        assert [span.rank for span in spans] == sorted({span.rank for span in spans})
    assert max(loads) - min(loads) <= 1 + 2 * (multiple - 1)


@given(st.lists(st.integers(0, 1000)))
def test_blocks_do_not_overlap(sizes: list[int]) -> None:
    offsets, end = line_offsets(sizes)
    assert end > 0
    for offset, size, following in zip(offsets, sizes, [*offsets[1:], end], strict=False):
        assert offset % 64 == 0
        assert offset + size <= following


@pytest.mark.usefixtures("no_segments_left")
@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_lie_in_one_memory(replicas: Replicas, world_size: int) -> None:
    for result in replicas(jobs.one_memory, world_size, "central_storage"):
        assert result == {
            "kept": True, "alike": True, "chiefs": True, "mapped": True, "seen": [7.0] * 4,
        }  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", list(jobs.OPTIMIZERS))
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_state_exists_once_and_is_saved_whole(
    replicas: Replicas, kind: str, world_size: int, tmp_path: Path
) -> None:
    results = replicas(jobs.states, world_size, "central_storage", kind, str(tmp_path))
    (one,) = replicas(jobs.states, 1, "one_device", kind, str(tmp_path))
    held = Counter[str]()
    for result in results:
        held.update(result["held"])
    assert held == one["held"]
    if kind == "Own":
        assert results[0]["held"] == one["held"]
    for result in results:
        assert result["still"] == result["held"]
        assert sorted(result["names"]) == sorted(one["names"])
        torch.testing.assert_close(result["weights"], one["weights"], rtol=0, atol=1e-12)
        torch.testing.assert_close(result["state"], one["state"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["Adam", "Slow", "Adafactor"])
def test_what_is_written_beside_the_gradients_is_written_once(
    replicas: Replicas, kind: str
) -> None:
    """By a forward pass of each replica, or by an optimizer of a user's own."""
    (one,) = replicas(jobs.averaged, 1, "one_device", kind)
    for found in replicas(jobs.averaged, 2, "central_storage", kind):
        torch.testing.assert_close(found, one, rtol=0, atol=1e-12)


def test_replicas_that_share_no_memory_are_refused(replicas: Replicas) -> None:
    for result in replicas(jobs.refused_memory, 2):
        assert result.startswith("UserError: central_storage for 2 replicas that share no memory")
        assert "Choose mirrored" in result


@shares_memory
@pytest.mark.usefixtures("no_segments_left")
def test_a_lost_replica_leaves_nothing_behind(tmp_path: Path) -> None:
    pool = Replicas()
    try:
        with pytest.raises(ReplicaError, match="exit code 3"):
            pool(jobs.die_in_an_update, 2, str(tmp_path))
    finally:
        pool.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_one_replica_keeps_its_own_memory() -> None:
    strategy = CentralStorageStrategy(cluster=ClusterSpec.alone(), device="cpu")
    net = torch.nn.Linear(2, 2)
    pointers = [p.data_ptr() for p in net.parameters()]
    strategy.prepare(net, torch.optim.Adam(net.parameters()))
    assert [p.data_ptr() for p in net.parameters()] == pointers
    assert strategy.state_dict()["optimizer"]["state"] == {}
    strategy.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parameter_device": "cuda:0"}, "parameter_device='cuda:0'.*Choose mirrored"),
        ({"device": "cuda:1"}, "device='cuda:1': this machine has none.*device='cpu'"),
        ({"device": torch.device("meta")}, "device='meta': tensors there have no values"),
    ],
)
def test_other_devices_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"(?s){message}"):
        _ = CentralStorageStrategy(cluster=ClusterSpec.alone(), **options).engine


@pytest.mark.parametrize(
    ("addresses", "local", "message"),
    [
        ({"worker": ("a:1", "b:1")}, 1, "1 of 2 replicas are on this one"),
        ({"worker": ("a:1", "a:2"), "ps": ("a:3",)}, 2, "central_storage with 1 ps"),
    ],
)
def test_other_clusters_are_refused(
    addresses: dict[str, tuple[str, ...]], local: int, message: str
) -> None:
    cluster = ClusterSpec(addresses, Task("worker", 0), 0, 2, 0, local, "a:1", "a test")
    with pytest.raises(UserError, match=message):
        _ = CentralStorageStrategy(cluster=cluster).engine


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("kind", ["Adam", "Adafactor"])
def test_hooks_on_steps_that_would_see_a_part_are_refused(
    replicas: Replicas, kind: str, is_before: bool
) -> None:
    for text in replicas(jobs.step_with_a_hook, 2, kind, is_before):
        assert text.startswith(f"1 an {kind} with hooks on its steps under central_storage")
        assert "choose mirrored" in text


def test_parameters_that_lie_in_shared_memory_stay_there() -> None:
    one, other = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    homes = [(one, one.data_ptr())]
    assert [each is other for each in homeless([one, other], homes)] == [True]
    one.data = torch.zeros(3)
    with pytest.raises(UserError, match="has other memory than when it was prepared"):
        homeless([one, other], homes)
