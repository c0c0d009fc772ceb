"""What parameter servers promise while nothing goes wrong: any number of workers, at any speed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from spartito.checkpoint.manager import CheckpointManager, read_checkpoint
from spartito.ps.client.vector import SpanCopies, Vector
from spartito.ps.protocol.layout import Span
from spartito.ps.protocol.memory import allocate
from spartito.ps.server.shard import Shard
from spartito.ps.server.update_log import entries
from spartito.strategies import strategy
from tests.replicas import ReplicaError, Replicas, warns
from tests.strategies import local_jobs, ps_jobs
from tests.strategies.jobs import blobs
from tests.strategies.ps_jobs import FINE, Asked, with_servers
from tests.strategies.ps_processes import job as processes

SMALL = {"servers": {"min_shard_bytes": 16}}

NARROW = {"shared_memory": False, "wire_dtype": "bf16"}


class Run:
    """What all tasks of a job returned, and the records that they left."""

    def __init__(self, replicas: Replicas, folder: Path, workers: int, ps: int, asked: Asked):
        folders = {"push_log": str(folder / "pushes"), "snapshot_dir": str(folder / "snapshots")}
        options = with_servers(asked.options, min_shard_bytes=FINE, **folders)
        filled = dataclasses.replace(asked, options=options, run_dir=str(folder / "run"))
        self.asked, self.folder, self.workers, self.ps = filled, folder, workers, ps
        # Of up to five processes, which start together: a minute where others have the cores.
        self.results = replicas(ps_jobs.train, workers, filled, servers=ps, timeout=250)
        self.first: dict[str, Any] = self.results[0]

    def record(self, task: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            (self.folder / "run" / "tasks" / f"{task.replace(' ', '-')}.json").read_text()
        )
        return found

    def servers(self) -> list[dict[str, Any]]:
        return [self.record(f"ps {number}") for number in range(self.ps)]

    def check(self) -> None:
        """All agree, and all that was planned was applied, once."""
        asked = self.asked
        for other in self.results[1:]:
            assert other["histories"] == self.first["histories"]
            assert other["evaluated"] == self.first["evaluated"]
            assert torch.equal(other["predictions"], self.first["predictions"])
            assert other["steps"] == self.first["steps"]
        items = asked.plan * self.workers
        for record in self.servers():
            assert record["work_items"] == items
            assert record["duplicates"] == record["lost"] == record["dropped"] == 0
            assert sum(record["staleness"].values()) * asked.accumulate >= record["work_items"]
        workers = [self.record(f"worker {index}") for index in range(self.workers)]
        assert sum(record["batches"] for record in workers) == items
        assert sum(record["examples"] for record in workers) == record_examples(self)
        if asked.optimizer != "Whole":
            again = ps_jobs.replayed(asked, self.folder / "pushes", self.ps)
            weights = self.first["weights"]
            rounded = 1e-2 if "wire_dtype" in asked.options["servers"] else 0.0
            assert all((weights[n] - again[n]).abs().max() <= rounded for n in weights)


def record_examples(run: Run) -> int:
    (examples,) = {record["examples"] for record in run.servers()}
    found: int = examples
    return found


def learned(run: Run, below: float = 0.5) -> None:
    losses = run.first["histories"][0]["loss"]
    assert losses[-1] < losses[0]
    assert run.first["evaluated"]["loss"] < below


@pytest.mark.parametrize(
    ("workers", "ps", "asked"),
    [
        (1, 1, Asked()),
        (3, 2, Asked(epochs=8)),
        (2, 1, Asked(epochs=8, options={"aggregate": 2})),
        (2, 2, Asked(epochs=8, options={"servers": NARROW})),
        (2, 2, Asked(epochs=8, clip=0.5, accumulate=2)),
        (2, 1, Asked(epochs=8, optimizer="SGD", rate=0.2, schedule="steps")),
        (2, 2, Asked(epochs=8, optimizer="Whole")),
        (2, 2, Asked(epochs=4, fits=2, validation=True)),
        (2, 1, Asked(epochs=6, steps=7)),
        (2, 1, Asked(epochs=6, stream=True)),
    ],
    ids=["alone", "three", "aggregate", "narrow", "clip", "schedule", "whole", "twice", "virtual",
         "stream"],
)  # fmt: skip
def test_it_learns_and_applies_every_item_once(
    replicas: Replicas, tmp_path: Path, workers: int, ps: int, asked: Asked
) -> None:
    run = Run(replicas, tmp_path, workers, ps, asked)
    run.check()
    if asked.epochs >= 6:
        learned(run, 0.9)
    if asked.steps is None:
        assert record_examples(run) == asked.epochs * asked.fits * asked.examples
    if asked.fits == 2:
        assert len(run.first["histories"][1]["val_loss"]) == asked.epochs
        assert run.first["steps"] == asked.plan
    if asked.schedule:
        assert run.first["lr"] < asked.rate


@pytest.mark.parametrize(("bound", "aggregate"), [(1, 1), (2, 1), (2, 2)])
def test_no_push_is_staler_than_the_bound(
    replicas: Replicas, tmp_path: Path, bound: int, aggregate: int
) -> None:
    options = {"max_staleness": bound, "aggregate": aggregate}
    run = Run(replicas, tmp_path, 3, 2, Asked(epochs=8, options=options))
    run.check()
    for record in run.servers():
        assert max(map(int, record["staleness"])) <= bound
        assert record["refused"] == 0


def test_deterministic_training_has_the_same_bits_in_every_run(
    replicas: Replicas, tmp_path: Path
) -> None:
    options = {"max_staleness": 0}
    asked = Asked(epochs=4, batch=9, examples=100, deterministic=True, options=options)
    runs = [Run(replicas, tmp_path / str(turn), 3, 2, asked) for turn in range(2)]
    for run in runs:
        run.check()
        assert run.first["histories"] == runs[0].first["histories"]
        for name, value in run.first["weights"].items():
            assert torch.equal(value, runs[0].first["weights"][name]), name


@pytest.mark.parametrize(("ps", "accumulate"), [(2, 1), (1, 3)])
def test_a_worker_that_is_alone_clips_as_a_plain_loop(
    replicas: Replicas, tmp_path: Path, ps: int, accumulate: int
) -> None:
    """No push is stale then, so the values are those of SGD with `clip_grad_norm_`."""
    asked = Asked(
        epochs=2, optimizer="SGD", rate=0.5, clip=0.05, accumulate=accumulate, stream=True
    )
    run = Run(replicas, tmp_path, 1, ps, asked)
    net = ps_jobs.network(asked)
    optimizer = ps_jobs.make_optimizer(asked, net)
    x, y = blobs(asked.examples, torch.float32)
    before = 0.0
    for _ in range(asked.epochs):
        for batch in range(0, asked.examples, asked.batch * accumulate):
            rows = slice(batch, batch + asked.batch * accumulate)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            before = max(before, float(nn.utils.clip_grad_norm_(net.parameters(), 0.05)))
            optimizer.step()
    assert before > 0.5  # it was clipped
    for name, value in net.state_dict().items():
        torch.testing.assert_close(run.first["weights"][name], value, atol=1e-5, rtol=0)


def test_a_narrow_wire_carries_half_the_bytes(replicas: Replicas, tmp_path: Path) -> None:
    asked = Asked(epochs=1, width=64)
    sizes = []
    for wire_dtype in (None, "bf16"):
        options = {"servers": {**NARROW, "wire_dtype": wire_dtype}}
        folder = tmp_path / str(wire_dtype)
        run = Run(replicas, folder, 1, 1, dataclasses.replace(asked, options=options))
        (record,) = run.servers()
        sizes.append((record["bytes_sent"], record["bytes_received"]))
    (sent, received), (half_sent, half_received) = sizes
    assert half_sent < 0.75 * sent
    assert half_received < 0.75 * received


@pytest.mark.parametrize("on_stale", ["reject", "compensate"])
def test_what_becomes_of_a_stale_push_is_as_asked(tmp_path: Path, on_stale: str) -> None:
    """Worker 0 computes one batch while worker 1 makes six updates: more than the bound."""
    options = {"max_staleness": 2, "on_stale": on_stale}
    asked = Asked(options=options, holds={"worker 0": 2, "worker 1": (2, 8)})
    with processes(tmp_path, asked, worker=2, ps=1) as found:
        found.held("worker 0", "worker 1")
        found.go("worker 1")
        found.held("worker 1")
        found.go("worker 0", "worker 1")
        found.finish()
        record = found.record("ps 0")
    staleness = max(map(int, record["staleness"]))
    if on_stale == "reject":
        assert record["refused"] >= 1
        assert staleness <= 2
    else:
        assert record["refused"] == 0
        assert staleness >= 6


def test_stale_pushes_are_computed_again(replicas: Replicas, tmp_path: Path) -> None:
    options = {"max_staleness": 1, "on_stale": "reject"}
    run = Run(replicas, tmp_path, 3, 1, Asked(epochs=8, options=options))
    (record,) = run.servers()
    assert record["work_items"] == run.asked.plan * 3
    assert max(map(int, record["staleness"])) <= 1
    learned(run, 0.9)


def test_stale_pushes_move_the_values_less(replicas: Replicas, tmp_path: Path) -> None:
    options = {"max_staleness": 1, "on_stale": "scale"}
    run = Run(replicas, tmp_path, 3, 1, Asked(epochs=8, options=options))
    run.check()
    learned(run, 0.9)


def test_running_statistics_are_those_of_the_data(replicas: Replicas, tmp_path: Path) -> None:
    run = Run(replicas, tmp_path, 2, 2, Asked(epochs=10, batch=24, norm=True, rate=0.002))
    run.check()
    weights = run.first["weights"]
    x, _ = blobs(run.asked.examples, torch.float32)
    inputs = x @ weights["0.weight"].T + weights["0.bias"]
    assert weights["1.num_batches_tracked"] > 0
    torch.testing.assert_close(weights["1.running_mean"], inputs.mean(0), atol=0.25, rtol=0)
    torch.testing.assert_close(weights["1.running_var"], inputs.var(0), atol=0.25, rtol=0.25)


def test_running_statistics_of_many_workers_stay_within_what_was_seen(
    replicas: Replicas, tmp_path: Path
) -> None:
    """Eight workers that each have a momentum of 0.3 go far beyond, if differences add up."""
    asked = Asked(epochs=4, batch=64, examples=512, norm=True, momentum=0.3, rate=0.002,
                  validation=True)  # fmt: skip
    run = Run(replicas, tmp_path, 8, 1, asked)
    run.check()
    history = run.first["histories"][0]
    assert all(map(math.isfinite, history["val_loss"]))
    spans = [variance.aminmax() for variance in variances(run)]
    assert all(0 < float(span.min) <= float(span.max) < 30 for span in spans)


def variances(run: Run) -> Iterator[torch.Tensor]:
    """BatchNorm's running variance on the server after each update."""
    net = ps_jobs.network(run.asked)
    optimizer = ps_jobs.make_optimizer(run.asked, net)
    vector = Vector(net, optimizer)
    span = Span(0, vector.layout.size)
    shard = Shard(vector.layout, span, optimizer, vector.tensors)
    served = SpanCopies(vector, span, shard.values)
    served.store()
    for entry in entries(run.folder / "pushes" / "ps-0.log"):
        gradient = torch.frombuffer(bytearray(entry.gradient), dtype=torch.uint8)
        shard.update(allocate(span).copy_(gradient), entry.absent, entry.rate, entry.fresh)
        served.load()
        yield net.get_buffer("1.running_var")


def test_a_chief_may_stop_in_the_middle(replicas: Replicas, tmp_path: Path) -> None:
    options = {"max_staleness": 1}  # worker 1 does not run ahead
    run = Run(replicas, tmp_path, 2, 1, Asked(callbacks="stop", epochs=50, options=options))
    assert len({json.dumps(result["histories"]) for result in run.results}) == 1
    assert len(run.first["histories"][0]["loss"]) == 1
    assert 7 <= run.first["steps"] < 12


def test_early_stopping_stops_all(replicas: Replicas, tmp_path: Path) -> None:
    run = Run(replicas, tmp_path, 2, 1, Asked(callbacks="early", epochs=50))
    assert [len(result["histories"][0]["loss"]) for result in run.results] == [2, 2]


def test_a_plateau_lowers_the_rate_everywhere(replicas: Replicas, tmp_path: Path) -> None:
    run = Run(replicas, tmp_path, 2, 1, Asked(schedule="plateau", epochs=4, validation=True))
    assert run.first["lr"] < run.asked.rate
    assert run.results[1]["lr"] < run.asked.rate  # that of the last epoch may not have come


@pytest.mark.parametrize("bound", [None, 0])
def test_checkpoints_cross_strategies(
    replicas: Replicas, tmp_path: Path, bound: int | None
) -> None:
    folder = str(tmp_path / "checkpoints")
    options = {"max_staleness": bound}
    asked = Asked(epochs=3, callbacks="save", checkpoints=folder, options=options)
    run = Run(replicas, tmp_path, 2, 2, asked)
    alone = Asked("one_device", epochs=6, load=folder, callbacks="save", checkpoints=folder)
    (one,) = replicas(ps_jobs.train, 1, alone)
    assert one["steps"] == 6 * 12
    (tmp_path / "again").mkdir()
    back = Asked(epochs=9, load=folder, options=options)
    again = replicas(ps_jobs.train, 2, filled(back, tmp_path / "again"), servers=1)
    for result in again:
        assert result["steps"] == 9 * 12
        assert len(result["histories"][0]["loss"]) == 3
        assert result["evaluated"]["loss"] < one["evaluated"]["loss"]
    assert one["evaluated"]["loss"] < run.first["evaluated"]["loss"]


@pytest.mark.parametrize("bound", [None, 0])
def test_counters_in_parameter_groups_are_those_of_the_servers(
    replicas: Replicas, tmp_path: Path, bound: int | None
) -> None:
    """A schedule is no reason to give the servers, or a checkpoint, the chief's own counters."""
    folder = tmp_path / "checkpoints"
    ends: list[tuple[int, float]] = []
    for epochs in (2, 4):
        (tmp_path / str(epochs)).mkdir()
        asked = Asked(optimizer="Counting", schedule="steps", rate=0.2, callbacks="save",
                      checkpoints=str(folder), epochs=epochs, load=str(folder) if ends else "",
                      options={"max_staleness": bound})  # fmt: skip
        Run(replicas, tmp_path / str(epochs), 2, 2, asked)
        newest = CheckpointManager(folder).latest()
        assert newest is not None
        (group,) = read_checkpoint(newest)["optimizer"]["groups"]
        ends.append((group["k"], group["lr"]))
    each = 12 if bound == 0 else 24  # updates of an epoch
    assert ends == [(2 * each, 0.2 * 0.5**6), (4 * each, 0.2 * 0.5**12)]


def filled(asked: Asked, folder: Path) -> Asked:
    options = with_servers(asked.options, min_shard_bytes=FINE, snapshot_dir=str(folder))
    return dataclasses.replace(asked, options=options)


@pytest.mark.parametrize("bound", [None, 2, 0])
def test_a_loop_of_ones_own(replicas: Replicas, tmp_path: Path, bound: int | None) -> None:
    asked = filled(Asked(own_loop=True, options={"max_staleness": bound}), tmp_path)
    results = replicas(ps_jobs.train, 2, asked, servers=2)
    assert sum(result["seen"] for result in results) == 3 * asked.examples
    first = results[0]["weights"]
    assert all(torch.equal(first[name], results[1]["weights"][name]) for name in first)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("in place", "0.bias and 3.bias of the model changed on worker 0 in a callback"),
        ("set", "3.bias of the model changed on worker 0 in a callback"),
    ],
)
def test_what_a_callback_writes_into_parameters_is_refused(
    replicas: Replicas, how: str, said: str
) -> None:
    """It runs on the chief alone, and the servers' values would replace it."""
    first, other = replicas(local_jobs.written_amid, 2, "parameter_server", SMALL, how, servers=1)
    assert said in first
    assert "ended the job: UserError: " in other
    back = replicas(local_jobs.written_amid, 2, "parameter_server", SMALL, "back", servers=1)
    assert all(isinstance(found, dict) for found in back)


@pytest.mark.parametrize(
    ("how", "workers", "said"),
    [
        ("before", 1, "0.bias of the model changed on worker 0 between two steps"),
        ("loop", 1, "3.bias of the model changed on worker 0 between two steps"),
        ("pre_hook", 1, "an optimizer with hooks on its step under parameter_server"),
        ("post_hook", 1, "an optimizer with hooks on its step under parameter_server"),
        ("between", 1, "0.bias of the model changed on worker 0 between two steps"),
        ("forward", 1, "0.weight of the model changed on worker 0 in the forward pass under"),
        ("forward .data", 1, "0.bias of the model changed on worker 0 in the forward pass under"),
        ("begins", 1, "optimizer.state.clear() under parameter_server"),
        ("loads", 1, "optimizer.load_state_dict() under parameter_server"),
        ("saves", 1, "optimizer.state_dict() under parameter_server"),
        ("frozen between", 2, "it trains"),
        ("frozen", 2, "0.weight of the model was frozen on worker 0 in a callback"),
        ("frozen", 1, "it trains"),
        ("still", 2, "0.bias of the model changed on worker 0 in a callback"),
        ("still", 1, "it trains"),
        ("waits", 1, "backward() without update() for a batch under parameter_server"),
    ],
)
def test_what_a_script_does_to_parameters_beside_the_servers_is_refused(
    replicas: Replicas, how: str, workers: int, said: str
) -> None:
    job = local_jobs.written_beside_servers
    found = replicas(job, workers, "parameter_server", SMALL, how, servers=1)
    assert said in found[0]


GROUPED = {**SMALL, "groups": 2, "every": 1, "quorum": 2}


@pytest.mark.parametrize(
    ("how", "chief", "said"),
    [
        ("frozen", 0, "0.weight of the model was frozen on worker 0 in a callback"),
        ("frozen", 1, "0.weight of the model was frozen on chief 0 in a callback"),
        ("unfrozen", 0, "0.bias of the model was unfrozen on worker 0 in a callback"),
        ("unfrozen", 1, "0.bias of the model was unfrozen on chief 0 in a callback"),
        ("buffer", 0, "steps of the model changed on worker 0 in a callback"),
        ("between", 0, "0.bias of the model changed on worker 0 between two steps"),
        ("between", 1, "0.bias of the model changed on chief 0 between two steps"),
        ("unfrozen between", 0, "the optimizer's parameters changed, or others learn now"),
    ],
)
def test_so_it_is_in_groups_and_beside_a_chief_that_computes_nothing(
    replicas: Replicas, how: str, chief: int, said: str
) -> None:
    job = local_jobs.written_beside_servers
    found = replicas(job, 4 + chief, "parameter_server", GROUPED, how, servers=1, chief=chief)
    assert said in found[0]


@pytest.mark.parametrize("options", [{"max_staleness": 0}, {"groups": 2, "every": 1, "quorum": 2}])
@pytest.mark.parametrize("chief", [0, 1])
def test_a_rate_that_a_callback_sets_for_an_epoch_holds_from_its_first_update(
    replicas: Replicas, options: dict[str, Any], chief: int
) -> None:
    found = replicas(
        local_jobs.rate_set, 2 + chief, "parameter_server", {**SMALL, **options}, servers=1,
        chief=chief,
    )  # fmt: skip
    for weights in found:
        for name, value in local_jobs.rate_set_by_torch().items():
            assert (weights[name] - value).abs().max() <= 1e-12


def test_a_second_model_is_refused(replicas: Replicas, tmp_path: Path) -> None:
    with pytest.raises(ReplicaError, match="a second model under parameter_server") as caught:
        replicas(prepare_twice, 1, {"servers": {"snapshot_dir": str(tmp_path)}}, servers=1)
    assert caught.value.kind == "UserError"


@pytest.mark.parametrize(("optimizer", "servers"), [("own", 2), ("own", 1), ("SGD", 2)])
def test_an_optimizer_of_ones_own_that_may_look_at_all_servers_values_is_refused(
    replicas: Replicas, tmp_path: Path, optimizer: str, servers: int
) -> None:
    options = {"max_staleness": 0, "servers": {"snapshot_dir": str(tmp_path), "min_shard_bytes": 8}}
    refusal = "OwnSGD may look at all parameters at once, of which each parameter server has some"
    is_refused = optimizer == "own" and servers > 1
    with pytest.raises(ReplicaError, match=refusal) if is_refused else nullcontext():
        replicas(prepare_exactly, 1, options, optimizer, servers=servers)


class OwnSGD(torch.optim.SGD):
    """Says nothing of what it looks at."""


def prepare_exactly(options: dict[str, Any], optimizer: str) -> None:
    made = strategy("parameter_server", **options)
    try:
        net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Linear(8, 2))
        kind = OwnSGD if optimizer == "own" else torch.optim.SGD
        made.prepare(net, kind(net.parameters(), 0.1), deterministic=True)
    finally:
        made.close()


@warns("unclosed file")  # a server records pushes until its process ends
def prepare_twice(options: dict[str, Any]) -> None:
    made = strategy("parameter_server", **options)
    try:
        for _ in range(2):
            net = torch.nn.Linear(2, 2)
            made.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    finally:
        made.close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_staleness": -1}, "max_staleness=-1"),
        ({"max_staleness": 1.5}, "max_staleness=1.5"),
        ({"on_stale": "rejects"}, "Did you mean 'reject'"),
        ({"aggregate": 0}, "aggregate=0"),
        ({"aggregate": 2, "max_staleness": 0}, "averages one push of every worker already"),
        ({"servers": {"min_shard_bytes": 0}}, "{'min_shard_bytes': 0}"),
        ({"servers": {"push_logs": "log"}}, "Did you mean 'push_log'"),
        ({"servers": {"lease_seconds": "soon"}}, "{'lease_seconds': 'soon'}"),
        ({"servers": {"snapshot_seconds": 0}}, "a number above 0"),
        ({"servers": {"shared_memory": 1}}, "of type bool"),
        ({"servers": {"wire_dtype": "int8"}}, "wire_dtype='int8'"),
        ({"servers": {"snapshot_dir": 3}}, "{'snapshot_dir': 3}"),
        ({"servers": 2}, "servers=2 is no dictionary"),
        ({}, "parameter_server without a parameter server"),
    ],
)
def test_mistakes_in_options_are_named(
    replicas: Replicas, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ReplicaError) as caught:
        replicas(ps_jobs.train, 1, Asked(options=options))
    assert caught.value.kind == "UserError"
    assert why in caught.value.text
