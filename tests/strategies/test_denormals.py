"""Denormal numbers are 0 wherever a strategy computes, and nowhere else."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from spartito.engine.devices.denormals import Denormals, flushes
from tests.replicas import Replicas
from tests.strategies import denormal_jobs as jobs

WAYS = [("one_device", 1, 0), ("mirrored", 2, 0), ("central_storage", 2, 0),
        ("parameter_server", 1, 1)]  # fmt: skip


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize(("name", "workers", "servers"), WAYS)
def test_fit_evaluate_and_predict(
    replicas: Replicas, name: str, workers: int, servers: int, flush: bool
) -> None:
    for found in replicas(jobs.fits, workers, name, 2 * workers, flush, servers=servers):
        assert found["after"] == dict.fromkeys(found["after"], False)
        assert found["bits"] == (0 if flush else jobs.HALF)
        for what in ("forward", "backward", "evaluation", "reading"):
            assert found["seen"][what] == {flush}, what
    if name == "mirrored":
        assert found["seen"]["callback"] == {flush}


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize(("name", "workers"), [("one_device", 1), ("mirrored", 2)])
def test_a_loop_of_ones_own(replicas: Replicas, name: str, workers: int, flush: bool) -> None:
    for found in replicas(jobs.loops, workers, name, 2 * workers, flush):
        bits = 0 if flush else jobs.HALF
        assert found == {
            "bits": bits, "after": False, "dropped": False, "one batch": bits, "left": flush,
            "closed": False, "collected": False,
        }  # fmt: skip


def test_the_thread_is_as_before_after_an_error(replicas: Replicas) -> None:
    assert replicas(jobs.fails, 1) == [[*[False] * 5, True]]


def test_who_flushes_already_goes_on(replicas: Replicas) -> None:
    assert replicas(jobs.keeps_what_was_set, 1) == [True]


def test_threads_that_run_already_are_reached(replicas: Replicas) -> None:
    (found,) = replicas(jobs.in_the_pool, 1, 1 << 20, 3)
    assert found == {"before": [jobs.HALF], "training": [0], "after": [jobs.HALF]}


def test_blocks_may_end_in_any_order() -> None:
    denormals = Denormals(True)
    first, second = (denormals.during(range(3)) for _ in range(2))
    assert not flushes()
    next(first), next(second)
    first.close()
    assert flushes()
    with denormals:
        second.close()
        assert flushes()
    assert not flushes()


def test_another_thread_ends_no_block_of_this_one() -> None:
    denormals = Denormals(True)
    stream: Iterator[int] = denormals.during(range(3))
    next(stream)
    found: list[bool] = []

    def close() -> None:
        denormals.close()
        found.append(flushes())

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert found == [True]  # inherited
    assert flushes()
    denormals.close()
    assert not flushes()
    assert list(stream) == [1, 2]
    assert not flushes()
