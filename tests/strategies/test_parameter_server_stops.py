"""Tasks of a job with parameter servers that stand still, are not there, or are not alike."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.commands import eventually
from tests.strategies.ps_jobs import LIMIT, Asked
from tests.strategies.ps_processes import Job, job
from tests.strategies.test_parameter_server_faults import LOST, applied_once

# Tasks that stand still


@pytest.mark.slow
def test_a_stopped_worker_is_named_and_comes_back(tmp_path: Path) -> None:
    asked = Asked(holds={"worker 1": 5, "worker 0": 8}, epochs=4)
    with job(tmp_path, asked, worker=2, ps=1, lease=1.0) as found:
        found.held("worker 1", "worker 0")
        found.signal(signal.SIGSTOP, "worker 1")
        silent = "worker 1 has not been heard of for 1 s: its work"
        assert eventually(lambda: found.said("worker 0", silent)), found.text
        found.go("worker 1")
        found.signal(signal.SIGCONT, "worker 1")
        assert eventually(lambda: found.said("worker 0", "worker 1 is back")), found.text
        found.go("worker 0")
        found.finish()
        applied_once(found, 1)


def test_a_stopped_worker_does_not_hold_up_a_group(tmp_path: Path) -> None:
    asked = Asked(options={"max_staleness": 0}, holds={"worker 1": 5})
    with job(tmp_path, asked, worker=2, ps=1, lease=1.0) as found:
        found.held("worker 1")
        found.signal(signal.SIGSTOP, "worker 1")
        assert found.ends("worker 0") == [0], found.text
        found.kill("worker 1")  # else the server waits a while, as it may want to look at values
        assert found.ends("ps 0") == [0], found.text
        assert found.said("worker 0", "worker 1 has not been heard of")
        applied_once(found, 1)


@contextmanager
def frozen_worker(folder: Path) -> Iterator[Job]:
    """A job with bound 2 on two servers, whose worker 1 is frozen in its second batch, and lost.

    Worker 0 stands in its first batch until then: else it might be through before the other is
    there. The epoch is long: worker 0 does its own slice and comes to its 30th batch meanwhile,
    so nobody has computed the work item that worker 1 holds.
    """
    holds: dict[str, int | tuple[int, ...]] = {"worker 1": 2, "worker 0": (1, 30)}
    asked = Asked(options={"max_staleness": 2}, holds=holds, epochs=1, examples=384)
    with job(folder, asked, worker=2, ps=2, lease=1.0) as found:
        found.held("worker 0", "worker 1")
        found.signal(signal.SIGSTOP, "worker 1")
        found.go("worker 0")
        found.held("worker 0")
        silent = "worker 1 has not been heard of for 1 s: its work"
        assert eventually(lambda: found.said("worker 0", silent)), found.text
        yield found


def bounded(found: Job) -> None:
    """No server applied a push that was staler than the bound, and each work item came once."""
    applied_once(found, 2)
    for number in range(2):
        assert max(map(int, found.record(f"ps {number}")["staleness"])) <= 2


def test_a_worker_that_comes_back_is_held_to_the_bound_by_every_server(tmp_path: Path) -> None:
    with frozen_worker(tmp_path) as found:
        found.go("worker 1")
        found.signal(signal.SIGCONT, "worker 1")
        assert eventually(lambda: found.said("worker 0", "worker 1 is back")), found.text
        found.go("worker 0")
        found.finish()
        bounded(found)


def test_a_worker_that_was_replaced_pushes_nowhere(tmp_path: Path) -> None:
    """Its successor holds a pull when the old process wakes up with a gradient."""
    with frozen_worker(tmp_path) as found:
        old = found.members["worker 1"]
        found.start("worker 1", asked=Asked(**{**found.asked.__dict__, "holds": {"worker 1": 1}}))
        found.held("worker 1")
        old.pipe.send("go")
        os.kill(old.process.pid, signal.SIGCONT)
        old.process.join(LIMIT)
        assert old.process.exitcode == 2, found.text
        assert found.said("worker 1", "error: another process has replaced worker 1")
        found.go("worker 0", "worker 1")
        found.finish()
        bounded(found)


@pytest.mark.parametrize("shared", [True, False])
def test_a_stopped_server_is_named_within_the_time_limit(tmp_path: Path, shared: bool) -> None:
    asked = Asked(
        options={"servers": {"shared_memory": shared}}, holds={"worker 0": 5, "worker 1": 5}
    )
    with job(tmp_path, asked, worker=2, ps=2) as found:
        found.held("worker 0", "worker 1")
        found.shorten(*found.members)
        found.signal(signal.SIGSTOP, "ps 0")
        found.go("worker 0", "worker 1")
        assert found.ends("worker 0", "worker 1") == [LOST, LOST], found.text
        for name in ("worker 0", "worker 1"):
            assert found.said(name, "error: (ps 0|worker 0) .*(did not reply within 3 s|is gone)")
        assert found.said("worker 0", "ps 0 .* did not reply within 3 s")
        assert not found.said("worker 0", "closed already")
        assert found.ends("ps 1") in ([0], [LOST]), found.text


@pytest.mark.parametrize("bound", [None, 0])
def test_without_a_chief_all_others_end(tmp_path: Path, bound: int | None) -> None:
    asked = Asked(options={"max_staleness": bound}, holds={"worker 0": 5, "worker 1": 5})
    with job(tmp_path, asked, worker=2, ps=1) as found:
        found.held("worker 0", "worker 1")  # else that one may be through with everything
        found.shorten(*found.members)
        found.kill("worker 0")
        found.go("worker 1")
        assert found.ends("worker 1", "ps 0") == [LOST, LOST], found.text
        for name in ("worker 1", "ps 0"):
            assert found.said(name, "error: worker 0 .* is gone"), found.text


def test_a_stopped_chief_is_named_by_all(tmp_path: Path) -> None:
    asked = Asked(holds={"worker 0": 5, "worker 1": 5})
    with job(tmp_path, asked, worker=2, ps=1) as found:
        found.held("worker 0", "worker 1")
        found.shorten(*found.members)
        found.signal(signal.SIGSTOP, "worker 0")
        found.go("worker 1")
        assert found.ends("worker 1", "ps 0") == [LOST, LOST], found.text
        assert found.said("worker 1", "error: worker 0 .* did not reply within 3 s")
        assert found.said("ps 0", "error: worker 0 .* was not heard of")


@pytest.mark.parametrize(
    ("number", "killed"), [(signal.SIGTERM, False), (signal.SIGUSR2, False), (signal.SIGTERM, True)]
)
@pytest.mark.slow
def test_a_server_that_is_told_to_end_stays_for_its_chief_alone(
    tmp_path: Path, number: signal.Signals, killed: bool
) -> None:
    with job(tmp_path, Asked(holds={"worker 0": 5}), worker=1, ps=2) as found:
        found.held("worker 0")
        found.signal(number, "ps 0", "ps 1")
        if killed:
            found.kill("worker 0")
            assert found.ends("ps 0", "ps 1") == [-number] * 2, found.text
        else:
            found.go("worker 0")
            found.finish()


def test_a_server_that_nobody_starts_is_named(tmp_path: Path) -> None:
    with job(tmp_path, Asked(), start=False, timeout=4, worker=1, ps=2) as found:
        found.start("worker 0", "ps 0")
        assert found.ends("worker 0") == [LOST], found.text
        assert found.said("worker 0", r"error: ps 1 \(127.0.0.1:\d+\) did not come")


def test_a_chief_that_nobody_starts_is_named(tmp_path: Path) -> None:
    with job(tmp_path, Asked(), start=False, timeout=2, chief=1, worker=1, ps=1) as found:
        found.start("worker 0", "ps 0")
        assert found.ends("worker 0", "ps 0") == [LOST, LOST], found.text
        for name in found.members:
            assert found.said(name, "error: chief 0 "), found.text


# Mistakes


def test_a_server_with_another_model_refuses_and_both_are_named(tmp_path: Path) -> None:
    with job(tmp_path, Asked(broken="ps 0"), worker=1, ps=1) as found:
        assert found.ends("worker 0") == [2], found.text
        assert found.said("worker 0", r"error: worker 0 has model \w+, ps 0 \S+ has \w+")
        found.shorten("ps 0")  # which waits for another chief
        assert found.ends("ps 0") == [LOST]


@pytest.mark.parametrize(
    "other", [{"max_staleness": 1}, {"servers": {"min_shard_bytes": 64}}, {"aggregate": 2}]
)
def test_a_server_with_other_options_refuses_and_both_are_named(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    with job(tmp_path, Asked(), start=False, worker=1, ps=1) as found:
        mine = found.asked.options | other
        mine["servers"] = found.asked.options["servers"] | other.get("servers", {})
        found.start("ps 0", asked=Asked(**{**found.asked.__dict__, "options": mine}))
        found.start("worker 0")
        assert found.ends("worker 0") == [2], found.text
        (name, value) = next(iter(other.get("servers", other).items()))
        assert found.said("worker 0", rf'error: worker 0 has rules .*, ps 0 .*"{name}":{value}')


def test_more_servers_than_parameters_is_refused_by_all(tmp_path: Path) -> None:
    asked = Asked(options={"servers": {"min_shard_bytes": 1 << 20}})
    with job(tmp_path, asked, worker=1, ps=5) as found:
        names = list(found.members)
        assert found.ends(*names) == [2] * len(names)
        assert found.said("worker 0", "5 parameter servers for parameters that fill 4")
        assert found.said(
            "worker 0", r'at most 4 with --ps, .*"min_shard_bytes": N}, .* than 1048576'
        )


def test_gradients_that_are_no_numbers_are_dropped_and_named(tmp_path: Path) -> None:
    asked = Asked(spoiled={"worker 1": (2, 5)}, holds={"worker 1": 6, "worker 0": 2})
    with job(tmp_path, asked, worker=2, ps=2) as found:
        found.held("worker 0", "worker 1")
        found.go("worker 0", "worker 1")
        found.finish()
        applied_once(found, 2)
        assert found.record("ps 1")["dropped"] == 2
        assert found.record("ps 1")["updates"] == 2 * asked.plan - 2
        named = r"worker 1: \d pushes were not finite and dropped: pass 0, step \d+, slice 1"
        assert found.said("worker 0", named)
        result = found.result("worker 0")
        losses = result["histories"][0]["loss"]
        assert losses[-1] < losses[0]
        for name in ("worker 0", "worker 1"):
            assert sum(found.result(name)["histories"][0]["skipped"]) == 2
        assert result["nans"] > 0, "no callback of the chief was shown what worker 1 had"


def test_too_many_of_them_end_the_job(tmp_path: Path) -> None:
    holds = {"worker 1": 6, "worker 0": 2}  # the last one that is sure to come: 5 are not too many
    asked = Asked(
        spoiled={"worker 1": range(1, 99)}, options={"servers": {"nan_limit": 5}}, holds=holds
    )
    with job(tmp_path, asked, worker=2, ps=1) as found:
        found.held("worker 0", "worker 1")
        found.go("worker 0", "worker 1")
        assert found.ends("worker 0") == [1], found.text
        why = r"error: \d+ pushes were not finite .* more than 5; the last by worker 1: pass \d"
        assert found.said("worker 0", why)
        assert found.ends("ps 0") == [0]
        assert found.ends("worker 1") != [0]


def test_an_exception_of_a_worker_ends_the_job_and_is_told_at_the_chief(tmp_path: Path) -> None:
    asked = Asked(fails="worker 1", epochs=1000)
    with job(tmp_path, asked, worker=3, ps=1) as found:
        assert found.ends("worker 1") == [1], found.text
        assert found.ends("worker 0") == [LOST], found.text
        assert found.said("worker 0", "error: worker 1 failed: ValueError: no such class in these")
        assert found.ends("ps 0") == [0], found.text


def test_a_worker_that_comes_after_the_end_is_told_so(tmp_path: Path) -> None:
    with job(tmp_path, Asked(epochs=1), worker=2, ps=1) as found:
        found.finish()
        found.start("worker 1", env={"SPARTITO_TIMEOUT": "2"})
        assert found.ends("worker 1") == [LOST]
        assert found.said("worker 1", "error: worker 0 .* did not come")
