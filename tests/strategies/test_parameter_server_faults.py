"""Tasks of a job with parameter servers that are killed, stopped, late, or not alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spartito.checkpoint.manager import CheckpointManager
from spartito.cluster.recovery import Recovery
from spartito.ps.server.update_log import entries
from spartito.storage import load_tensors
from tests.commands import eventually
from tests.strategies.ps_jobs import LIMIT, Asked, make_optimizer, network, replayed, schedule
from tests.strategies.ps_processes import Job, job

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


def history(found: Job) -> dict[str, list[Any]]:
    """What the chief's only training came to."""
    (figures,) = found.result(chief(found))["histories"]
    return dict(figures)


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
        assert history(found)["redone"] == [0] * 4  # what a worker had not pushed is not lost
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
    """Both go batch by batch until there is one: alone, each would work on in the next epoch."""
    batches = tuple(range(1, 37))
    asked = Asked(callbacks="save", checkpoints=str(tmp_path / "run" / "checkpoints"),
                  recipe=recipe, holds={"worker 0": batches, "worker 1": batches})  # fmt: skip
    with job(tmp_path, asked, worker=2, ps=1) as found:
        found.held("worker 0", "worker 1")
        gone = 0
        while not CheckpointManager(asked.checkpoints).all():
            found.go("worker 0", "worker 1")
            found.held("worker 0", "worker 1")
            gone += 1
        found.kill("worker 1")
        load = "" if recipe else asked.checkpoints
        again = replace(found.asked, holds={"worker 1": 2}, load=load)
        found.start("worker 1", asked=again)
        found.held("worker 1")  # it computes its second batch
        found.go("worker 1", *["worker 0"] * (len(batches) - gone))
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


@pytest.mark.slow
def test_a_chief_that_is_busy_leaves_the_schedule_to_go_on(tmp_path: Path) -> None:
    """It waits in its first batch, while the other worker makes more steps than were foreseen."""
    asked = Asked(optimizer="SGD", schedule="cycle", examples=8600, batch=2, epochs=1,
                  holds={"worker 0": 1, "worker 1": 8400})  # fmt: skip
    with job(tmp_path, asked, worker=2, ps=1, timeout=LIMIT) as found:
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
        redone = history(found)["redone"]
        assert len(redone) == asked.epochs
        # A worker may give up its lease before the chief looks: what it did of that is not counted.
        assert sum(redone) >= (lost if bound is not None else 1)
        said = f"ps 1 .* was started again: {sum(redone)} work items are done again"
        assert found.said("worker 0", said)
        lines = (tmp_path / "run" / "history.jsonl").read_text().splitlines()
        assert [json.loads(line)["redone"] for line in lines] == redone
        warned = found.said("worker 0", "computed with newer values of the other servers")
        assert warned == (bound == 0)


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
        assert sum(history(found)["redone"]) >= lost
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
    assert [len(figures) for figures in result["histories"][0].values()] == [found.asked.epochs] * 5
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


LATER = (15, 18, 21, 24)


def test_a_job_that_was_killed_ends_at_its_own_last_step(tmp_path: Path) -> None:
    """A worker has done more than the other when the backup is written: that is done again."""
    asked = Asked(optimizer="SGD", schedule="steps", callbacks="backup", epochs=3,
                  checkpoints=str(tmp_path / "backup"),
                  holds={"worker 0": (1, *LATER), "worker 1": 3})  # fmt: skip
    with job(tmp_path, asked, chief=1, worker=2, ps=1) as found:
        found.held("worker 0", "worker 1")  # that one has reported its first work
        for _ in LATER:  # a backup that is due while one is written waits for another step
            found.go("worker 0")
            found.held("worker 0")
            if eventually(
                lambda: max(map(_step, tmp_path.glob("backup/*/step-*")), default=0) >= 8, 9
            ):
                break
        else:
            raise AssertionError(found.text)
        found.kill(*found.members)
    with job(tmp_path, replace(asked, holds={}), chief=1, worker=2, ps=1) as found:
        found.finish()
        assert found.said(
            "chief 0", r"going on after step [1-4], from .*step-0000(000[89]|00[12].)"
        )
        result = found.result("chief 0")
        assert result["steps"] == asked.plan
        assert result["lr"] == asked.rate * 0.5 ** (asked.plan // 4), found.text
        assert [len(figures) for figures in result["histories"][0].values()] == [3, 3, 3]


def _step(path: Path) -> int:
    return int(path.name.partition("-")[2])
