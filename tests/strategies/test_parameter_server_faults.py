"""Tasks of a job with parameter servers that are killed, stopped, late, or not alike."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spartito.cluster.recovery import Recovery
from spartito.ps.server.update_log import entries
from spartito.storage import load_tensors
from tests.commands import SPARTITO, addresses, cluster_of, commands_in, eventually, tf_config
from tests.strategies.ps_jobs import (
    LIMIT,
    Asked,
    Job,
    job,
    make_optimizer,
    network,
    replayed,
    schedule,
)

LOST = 69


def applied_once(found: Job, servers: int) -> None:
    """Every work item of all epochs is applied exactly once on each shard, and nothing else is."""
    asked = found.asked
    workers = len(found.cluster["worker"])
    examples = asked.epochs * asked.fits * asked.examples
    for number in range(servers):
        record = found.record(f"ps {number}")
        assert (record["work_items"], record["examples"]) == (asked.plan * workers, examples), (
            record
        )
    weights = found.result(chief(found))["weights"]
    again = replayed(asked, found.folder / "pushes", servers)
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def chief(found: Job) -> str:
    return "chief 0" if "chief" in found.cluster else "worker 0"


# A worker dies


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("bound", [None, 2, 0])
def test_a_killed_worker_costs_nothing(tmp_path: Path, bound: int | None, servers: int) -> None:
    others = () if bound else ("worker 0", "worker 2")  # the gate would hold them all up
    holds = {"worker 1": 2} | ({} if bound == 0 else dict.fromkeys(others, 2))
    asked = Asked(options={"max_staleness": bound}, holds=holds, epochs=4)
    with job(tmp_path, asked, worker=3, ps=servers, lease=5.0) as found:
        found.held(*holds)
        found.kill("worker 1")
        found.go(*[name for name in holds if name != "worker 1"])
        found.finish()
        assert found.said("worker 0", "worker 1 is gone: its work goes to others")
        applied_once(found, servers)
        histories = [found.result(name)["histories"] for name in ("worker 0", "worker 2")]
        assert histories[0] == histories[1]
        if bound:
            assert max(map(int, found.record("ps 0")["staleness"])) <= bound


def test_a_killed_worker_that_is_started_again_gets_work(tmp_path: Path) -> None:
    asked = Asked(holds={"worker 1": 3, "worker 0": 10}, epochs=6)
    with job(tmp_path, asked, worker=2, ps=1) as found:
        found.held("worker 0", "worker 1")
        found.kill("worker 1")
        found.start("worker 1", asked=Asked(**{**found.asked.__dict__, "holds": {"worker 1": 4}}))
        found.held("worker 1")  # it computes its fourth batch
        found.go("worker 0", "worker 1")
        found.finish()
        applied_once(found, 1)
        assert found.record("worker 1")["batches"] >= 4


@pytest.mark.parametrize("recipe", [False, True])
def test_a_worker_that_finds_a_newer_checkpoint_begins_where_the_chief_did(
    tmp_path: Path, recipe: bool
) -> None:
    """Both wait in the last epoch, and the one before it is in the checkpoint."""
    asked = Asked(callbacks="save", checkpoints=str(tmp_path / "run" / "checkpoints"),
                  recipe=recipe, holds={"worker 0": 26, "worker 1": 26})  # fmt: skip
    with job(tmp_path, asked, worker=2, ps=1) as found:
        found.held("worker 0", "worker 1")
        found.kill("worker 1")
        load = "" if recipe else asked.checkpoints
        again = replace(found.asked, holds={"worker 1": 2}, load=load)
        found.start("worker 1", asked=again)
        found.held("worker 1")  # it computes its second batch
        found.go("worker 0", "worker 1")
        found.finish()
        applied_once(found, 1)
        assert found.result("worker 1")["histories"] == found.result("worker 0")["histories"]


def rates(found: Job) -> list[float]:
    """The learning rate of each global step, by torch."""
    net = network(found.asked)
    optimizer = make_optimizer(found.asked, net)
    scheduler = schedule(found.asked)(optimizer)
    told = []
    for step in range(found.asked.plan):
        told.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if step + 1 < found.asked.plan:
            scheduler.step()
    return told


def scheduled(found: Job, servers: int) -> None:
    """Every update of every server had the learning rate of its global step."""
    workers, expected = len(found.cluster["worker"]), rates(found)
    for number in range(servers):
        for at, entry in enumerate(entries(found.folder / "pushes" / f"ps-{number}.log")):
            assert entry.settings[0]["lr"] == expected[at // workers], (number, at)


def test_a_worker_that_is_started_again_leaves_the_learning_rate_alone(tmp_path: Path) -> None:
    asked = Asked(optimizer="SGD", rate=0.2, schedule="steps", epochs=6,
                  holds={"worker 1": 3, "worker 0": 20})  # fmt: skip
    with job(tmp_path, asked, worker=2, ps=2) as found:
        found.held("worker 0", "worker 1")
        found.kill("worker 1")
        found.start("worker 1", asked=Asked(**{**found.asked.__dict__, "holds": {"worker 1": 2}}))
        found.held("worker 1")  # it has pushed
        found.go("worker 0", "worker 1")
        found.finish()
        applied_once(found, 2)
        scheduled(found, 2)


def test_a_chief_that_is_busy_leaves_the_schedule_to_go_on(tmp_path: Path) -> None:
    """It waits in its first batch, while the other worker makes more steps than were foreseen."""
    asked = Asked(optimizer="SGD", schedule="cycle", examples=5000, batch=2, epochs=1,
                  holds={"worker 0": 1, "worker 1": 4800})  # fmt: skip
    with job(tmp_path, asked, worker=2, ps=1) as found:
        found.held("worker 0", "worker 1")
        found.go("worker 0", "worker 1")
        found.finish()
        scheduled(found, 1)


def test_a_server_that_is_started_again_counts_no_global_step_twice(tmp_path: Path) -> None:
    asked = Asked(
        optimizer="SGD", schedule="cycle", epochs=4, holds={"worker 0": 13, "worker 1": 13}
    )
    with job(tmp_path, asked, worker=2, ps=2) as found:
        found.held("worker 0", "worker 1")
        found.kill("ps 0")
        found.start("ps 0")
        found.go("worker 0", "worker 1")
        found.finish()
        applied_once(found, 2)
        scheduled(found, 2)
        for name in ("worker 0", "worker 1"):
            assert found.result(name)["steps"] == asked.plan


def test_accumulated_items_of_a_killed_worker_are_done_again_as_one(tmp_path: Path) -> None:
    asked = Asked(accumulate=2, holds={"worker 1": 4, "worker 0": 2}, examples=104)
    with job(tmp_path, asked, worker=2, ps=2) as found:
        found.held("worker 0", "worker 1")  # else worker 0 might do all the work
        found.kill("worker 1")
        found.go("worker 0")
        found.finish()
        applied_once(found, 2)


# A server dies


def updates(found: Job, number: int) -> int:
    """How many updates a server has logged."""
    return sum(1 for _ in entries(found.folder / "pushes" / f"ps-{number}.log"))


@pytest.mark.parametrize("bound", [None, 2, 0])
def test_a_killed_server_goes_on_from_its_snapshot(tmp_path: Path, bound: int | None) -> None:
    """Both workers wait, so that it is known what was done: all since the first snapshot."""
    batch = 2 if bound else 9  # the gate lets no worker go far beyond one that waits
    asked = Asked(options={"max_staleness": bound}, holds={"worker 0": batch, "worker 1": batch})
    with job(tmp_path, asked, worker=2, ps=2) as found:
        found.held("worker 0", "worker 1")
        lost = updates(found, 1)
        assert lost >= batch - 1
        found.kill("ps 1")
        found.start("ps 1")
        found.go("worker 0", "worker 1")
        found.finish()
        applied_once(found, 2)
        assert found.record("ps 1")["lost"] == lost
        assert found.record("ps 0")["lost"] == 0
        assert found.said("ps 1", f"snapshot of update 0; updates lost so far: {lost}")
        assert found.said("worker 0", r"ps 1 .* was started again: \d+ work items are done")


def test_a_server_that_dies_twice_counts_all_that_was_lost(tmp_path: Path) -> None:
    """The worker waits, so that nothing happens between the death and the look at what is left."""
    with job(tmp_path, Asked(holds={"worker 0": (6, 14)}), worker=1, ps=1, snapshots=0.02) as found:
        lost = 0
        for _ in range(2):
            found.held("worker 0")
            found.kill("ps 0")
            lost += updates(found, 0) - version(tmp_path / "snapshots")
            found.start("ps 0")
            found.go("worker 0")
        found.finish()
        assert found.record("ps 0")["lost"] == lost
        applied_once(found, 1)


def version(folder: Path) -> int:
    """The update of the snapshot that a killed server has left."""
    (path,) = folder.glob("*.safetensors")
    about: dict[str, Any] = json.loads(load_tensors(path)["about"].numpy().tobytes())
    found: int = about["counts"][0]
    return found


def test_a_server_dies_while_nobody_looks_and_the_last_lease_is_done_again(
    tmp_path: Path,
) -> None:
    """The only worker has had every result when the server dies."""
    asked = Asked(holds={"worker 0": 24}, examples=96, batch=4, epochs=1)
    with job(tmp_path, asked, worker=1, ps=1) as found:
        found.held("worker 0")
        found.kill("ps 0")
        found.start("ps 0")
        found.go("worker 0")
        found.finish()
        applied_once(found, 1)


def test_snapshots_are_gone_after_the_job(tmp_path: Path) -> None:
    with job(tmp_path, Asked(epochs=1), worker=1, ps=2, snapshots=0.01) as found:
        found.finish()
        assert list((tmp_path / "snapshots").iterdir()) == []


# The chief dies


def led(bound: int | None) -> Asked:
    """Both workers wait in their second epoch; the rate changes with every global step."""
    return Asked(
        options={"max_staleness": bound, "recovery": Recovery(wait=LIMIT)},
        optimizer="SGD", schedule="cycle", epochs=3, validation=True, deterministic=bound == 0,
        holds={"worker 0": 16, "worker 1": 16},
    )  # fmt: skip


def without_a_chief(found: Job) -> None:
    """Kill the chief while nobody gets on, and start it again."""
    found.held("worker 0", "worker 1")
    found.kill("chief 0")
    found.start("chief 0")
    found.go("worker 0", "worker 1")
    found.finish()
    assert found.said("chief 0", "chief 0 .* goes on with the job")
    assert found.said("worker 0", "chief 0 .* is gone: waiting")
    applied_once(found, 2)
    result = found.result("chief 0")
    assert result["steps"] == found.asked.plan
    assert [len(figures) for figures in result["histories"][0].values()] == [found.asked.epochs] * 4
    assert result["histories"] == found.result("worker 1")["histories"]
    lines = (found.folder / "run" / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3]
    assert [path.suffix for path in (found.folder / "snapshots").iterdir()] == []


def test_another_process_goes_on_as_the_chief(tmp_path: Path) -> None:
    with job(tmp_path, led(None), chief=1, worker=2, ps=2) as found:
        without_a_chief(found)
        scheduled(found, 2)


@pytest.mark.slow
def test_the_death_of_the_chief_changes_no_number(tmp_path: Path) -> None:
    """Rounds are equal in all runs: to the last bit."""
    results = []
    for name, ends in (("killed", without_a_chief), ("whole", None)):
        asked = led(0) if ends else replace(led(0), holds={})
        (tmp_path / name).mkdir()
        with job(tmp_path / name, asked, chief=1, worker=2, ps=2) as found:
            (ends or Job.finish)(found)
            results.append(found.result("chief 0"))
    one, other = results
    assert one["histories"] == other["histories"]
    assert all(torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"])
    assert (one["lr"], one["evaluated"]) == (other["lr"], other["evaluated"])


# All die


def test_a_job_that_was_killed_ends_at_its_own_last_step(tmp_path: Path) -> None:
    """A worker has done more than the other when the backup is written: that is done again."""
    asked = Asked(optimizer="SGD", schedule="steps", callbacks="backup", epochs=3,
                  checkpoints=str(tmp_path / "backup"), holds={"worker 0": 18, "worker 1": 3},
                  )  # fmt: skip
    with job(tmp_path, asked, chief=1, worker=2, ps=1) as found:
        found.held("worker 0", "worker 1")
        assert eventually(lambda: max(map(_step, tmp_path.glob("backup/*/step-*")), default=0) >= 8)
        found.kill(*found.members)
    with job(tmp_path, replace(asked, holds={}), chief=1, worker=2, ps=1) as found:
        found.finish()
        assert found.said("chief 0", r"going on after step [1-4], from .*step-0000(0008|0009|001.)")
        result = found.result("chief 0")
        assert result["steps"] == asked.plan
        assert result["lr"] == asked.rate * 0.5 ** (asked.plan // 4), found.text
        assert [len(figures) for figures in result["histories"][0].values()] == [3, 3]


def _step(path: Path) -> int:
    return int(path.name.partition("-")[2])


# Tasks that stand still


@pytest.mark.slow
def test_a_stopped_worker_is_named_and_comes_back(tmp_path: Path) -> None:
    asked = Asked(holds={"worker 1": 5, "worker 0": 8}, epochs=4)
    with job(tmp_path, asked, worker=2, ps=1, lease=1.0) as found:
        found.held("worker 1", "worker 0")
        found.signal(signal.SIGSTOP, "worker 1")
        assert eventually(
            lambda: found.said("worker 0", "worker 1 has not been heard of for 1 s: its work")
        )
        found.go("worker 1")
        found.signal(signal.SIGCONT, "worker 1")
        assert eventually(lambda: found.said("worker 0", "worker 1 is back"))
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


def frozen_worker(folder: Path) -> Any:
    """A job with bound 2 on two servers, whose worker 1 freezes in its third batch.

    The epoch is long: worker 0 does its own slice and comes to its 30th batch meanwhile, so
    nobody has computed the work item that worker 1 holds.
    """
    holds = {"worker 1": 3, "worker 0": 30}
    asked = Asked(options={"max_staleness": 2}, holds=holds, epochs=1, examples=384)
    return job(folder, asked, worker=2, ps=2, lease=1.0)


def bounded(found: Job) -> None:
    """No server applied a push that was staler than the bound, and each work item came once."""
    applied_once(found, 2)
    for number in range(2):
        assert max(map(int, found.record(f"ps {number}")["staleness"])) <= 2


def test_a_worker_that_comes_back_is_held_to_the_bound_by_every_server(tmp_path: Path) -> None:
    with frozen_worker(tmp_path) as found:
        found.held("worker 1")
        found.signal(signal.SIGSTOP, "worker 1")
        found.held("worker 0")
        found.go("worker 1")
        found.signal(signal.SIGCONT, "worker 1")
        assert eventually(lambda: found.said("worker 0", "worker 1 is back"))
        found.go("worker 0")
        found.finish()
        bounded(found)


def test_a_worker_that_was_replaced_pushes_nowhere(tmp_path: Path) -> None:
    """Its successor holds a pull when the old process wakes up with a gradient."""
    with frozen_worker(tmp_path) as found:
        found.held("worker 1")
        found.signal(signal.SIGSTOP, "worker 1")
        found.held("worker 0")
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
    asked = Asked(options={"shared_memory": shared}, holds={"worker 0": 5, "worker 1": 5})
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
    asked = Asked(options={"max_staleness": bound}, holds={"worker 0": 5})
    with job(tmp_path, asked, worker=2, ps=1) as found:
        found.held("worker 0")
        found.shorten(*found.members)
        found.kill("worker 0")
        assert found.ends("worker 1", "ps 0") == [LOST, LOST], found.text
        for name in ("worker 1", "ps 0"):
            assert found.said(name, "error: worker 0 .* is gone"), found.text


def test_a_stopped_chief_is_named_by_all(tmp_path: Path) -> None:
    with job(tmp_path, Asked(holds={"worker 0": 5}), worker=2, ps=1) as found:
        found.held("worker 0")
        found.shorten(*found.members)
        found.signal(signal.SIGSTOP, "worker 0")
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


@pytest.mark.parametrize("other", [{"max_staleness": 1}, {"min_shard_bytes": 64}, {"aggregate": 2}])
def test_a_server_with_other_options_refuses_and_both_are_named(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    with job(tmp_path, Asked(), start=False, worker=1, ps=1) as found:
        mine = found.asked.options | other
        found.start("ps 0", asked=Asked(**{**found.asked.__dict__, "options": mine}))
        found.start("worker 0")
        assert found.ends("worker 0") == [2], found.text
        (name, value) = next(iter(other.items()))
        assert found.said("worker 0", rf'error: worker 0 has rules .*, ps 0 .*"{name}":{value}')


def test_more_servers_than_parameters_is_refused_by_all(tmp_path: Path) -> None:
    asked = Asked(options={"min_shard_bytes": 1 << 20})
    with job(tmp_path, asked, worker=1, ps=5) as found:
        names = list(found.members)
        assert found.ends(*names) == [2] * len(names)
        assert found.said("worker 0", "5 parameter servers for parameters that fill 4")
        assert found.said(
            "worker 0", r"at most 4 with --ps, .*min_shard_bytes=N\), .* than 1048576"
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
    holds = {"worker 1": 7, "worker 0": 2}
    asked = Asked(spoiled={"worker 1": range(1, 99)}, options={"nan_limit": 5}, holds=holds)
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


OWN_LOOP = """
import torch
import spartito as sp
strategy = sp.strategy()
net = torch.nn.Linear(4, 3)
def train():
    model, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    data = sp.data.arrays(torch.randn(64, 4), torch.arange(64) % 3).batch(8)
    batches = strategy.distribute(data)
    for _ in range(10_000):
        for batch in batches:
            losses = torch.nn.functional.cross_entropy(model(batch.x), batch.y, reduction="none")
            strategy.backward(losses, batch)
            strategy.update(optimizer)
            if str(strategy.task) == "worker 1":
                raise ValueError("no such class")
if strategy.task.type == "ps":
    try:
        train()
    except:
        pass
    print("runs on", flush=True)
else:
    train()
"""


def test_a_loop_of_ones_own_that_raises_is_told_and_a_server_never_runs_on(tmp_path: Path) -> None:
    with commands_in(tmp_path) as commands:
        script = commands.write("train.py", OWN_LOOP)
        cluster = cluster_of(worker=2, ps=1)
        tasks = [("worker", 0), ("worker", 1), ("ps", 0)]
        programs = [
            commands.start(sys.executable, script, env=tf_config(cluster, *task)) for task in tasks
        ]
        chief, worker, server = [program.end() for program in programs]
        assert (chief.code, worker.code, server.code) == (LOST, 1, 0), chief.text
        assert "error: worker 1 failed: ValueError: no such class" in chief.err
        assert "runs on" not in server.text


def test_a_server_without_a_chief_ends_whatever_its_script_catches(tmp_path: Path) -> None:
    with commands_in(tmp_path) as commands:
        script = commands.write("train.py", OWN_LOOP)
        cluster = cluster_of(worker=2, ps=1)
        env = {**tf_config(cluster, "ps", 0), "SPARTITO_TIMEOUT": "1"}
        ended = commands.python(script, env=env)
        assert ended.code == LOST, ended.text
        assert "error: worker 0 " in ended.err
        assert "runs on" not in ended.text


def test_a_worker_that_comes_after_the_end_is_told_so(tmp_path: Path) -> None:
    with job(tmp_path, Asked(epochs=1), worker=2, ps=1) as found:
        found.finish()
        found.start("worker 1", env={"SPARTITO_TIMEOUT": "2"})
        assert found.ends("worker 1") == [LOST]
        assert found.said("worker 1", "error: worker 0 .* did not come")


# As users start it


SCRIPT = """
import os, time, torch
import spartito as sp
strategy = sp.strategy(push_log="pushes", min_shard_bytes=16, snapshot_seconds=1000)
with strategy.scope():
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(net.parameters())
print("process", os.getpid(), "is", strategy.task, flush=True)
class Watch(sp.Callback):
    def on_train_batch_end(self, batch, logs):
        if self.trainer.step >= 100 and not os.path.exists("go"):
            print("step 100", flush=True)
            while not os.path.exists("go"):
                time.sleep(0.01)
x, y = torch.randn(1024, 4), torch.arange(1024) % 3
trainer = sp.Trainer(net, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss(), strategy=strategy)
trainer.fit((x, y), epochs=4, batch_size=8, callbacks=[Watch()], verbose=0)
print("end of", strategy.task, flush=True)
"""


@pytest.mark.slow
def test_the_launcher_starts_a_killed_server_again(tmp_path: Path) -> None:
    with commands_in(tmp_path) as commands:
        script = commands.write("train.py", SCRIPT)
        words = ("run", "--strategy", "parameter_server", "--workers", "2", "--ps", "2")
        program = commands.start(
            *SPARTITO,
            *words,
            script,
            env={"SPARTITO_TIMEOUT": "120", "SPARTITO_RUN_DIR": str(tmp_path / "run")},
        )
        server = int(program.wait_for(r"process (\d+) is ps 1").group(1))
        program.wait_for("step 100")
        os.kill(server, signal.SIGKILL)
        commands.write("go", "")  # the chief waits for it
        ended = program.end()
        assert ended.code == 0, ended.text
        assert "is started again" in ended.text
        assert "work items are done again" in ended.text
        record = json.loads((tmp_path / "run" / "tasks" / "ps-1.json").read_text())
        assert record["work_items"] == 4 * 128 * 2
        assert record["examples"] == 4 * 1024
        assert record["lost"] > 0


FINAL = """
class Final(sp.Callback):
    def on_epoch_end(self, epoch, logs):
        if epoch == 3:
            before = [p.clone() for p in net.parameters()]
            print("settled", flush=True)
            while not os.path.exists("go"):
                time.sleep(0.01)
            served = strategy.state_dict()["model"]
            print("equal", all(map(torch.equal, before, served.values())), flush=True)
"""


@pytest.mark.slow
def test_a_server_that_dies_after_the_last_epoch_has_lost_nothing(tmp_path: Path) -> None:
    """Nobody would compute it again: the workers ask for no work any more."""
    with commands_in(tmp_path) as commands:
        text = SCRIPT.replace("x, y =", FINAL + "x, y =").replace("Watch()", "Final()")
        script = commands.write("train.py", text)
        words = ("run", "--strategy", "parameter_server", "--workers", "2", "--ps", "1")
        program = commands.start(*SPARTITO, *words, script, env={"SPARTITO_TIMEOUT": "120"})
        server = int(program.wait_for(r"process (\d+) is ps 0").group(1))
        program.wait_for("settled")
        os.kill(server, signal.SIGKILL)
        commands.write("go", "")
        ended = program.end()
        assert ended.code == 0, ended.text
        assert "is started again" in ended.text
        assert "equal True" in ended.text
        assert "work items are done again" not in ended.text


@pytest.mark.slow
def test_a_chief_that_is_interrupted_can_still_fetch_the_values(tmp_path: Path) -> None:
    """Ctrl-C comes to all tasks; the servers serve until the chief has ended."""
    with commands_in(tmp_path) as commands:
        fit = SCRIPT.index("trainer.fit")
        lines = SCRIPT[fit:].replace("epochs=4", "epochs=4000").splitlines()
        save = "except KeyboardInterrupt:\n    strategy.state_dict(); print('saved'); raise\n"
        text = f"{SCRIPT[:fit]}try:\n    {lines[0]}\n{save}"
        script = commands.write("train.py", text)
        words = ("run", "--strategy", "parameter_server", "--workers", "2", "--ps", "1")
        program = commands.start(*SPARTITO, *words, script, env={"SPARTITO_TIMEOUT": "120"})
        program.wait_for("step 100")
        commands.write("go", "")
        program.send(signal.SIGINT)
        ended = program.end()
        assert ended.code == 128 + signal.SIGINT, ended.text
        assert "saved" in ended.text
        assert "Traceback" not in ended.text


@pytest.mark.slow
def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.socket() as taken, commands_in(tmp_path) as commands:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cluster = {"worker": addresses(1), "ps": [f"127.0.0.1:{port}"]}
        script = commands.write("train.py", SCRIPT)
        ended = commands.python(script, env=tf_config(cluster, "ps", 0))
        assert ended.code == 2
        assert f"ps 0 cannot listen on 127.0.0.1:{port}" in ended.err
        assert "Traceback" not in ended.err
