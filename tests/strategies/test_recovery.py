"""Tasks that are killed in the middle of a training: what the others and their replacements find.

Each task is a process that kills itself once at a step; the test starts it again, or not.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import isnan, nan
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spartito as sp
from spartito.cluster.recovery import Recovery
from spartito.cluster.store.server import Server
from spartito.engine.logged import log
from spartito.errors import UserError
from spartito.registry import strategy_info
from spartito.steps.recovery import ElsewhereError, Standing, share_state
from spartito.strategies import strategy as named_strategy
from spartito.wire.secret import Key
from tests import stacks
from tests.collectives.group import spec
from tests.commands import eventually
from tests.processes import context
from tests.replicas import Replicas, on_host
from tests.strategies.jobs import blobs

LIMIT = 120.0
SECRET = "known to the tasks alone"


Spot = Callable[[Callable[[], None]], None]
"""Gets a function that ends the process, to be called within the step that begins now."""


@dataclass(frozen=True)
class Plan:
    """A job of ``workers``: who is killed at which steps, and what is trained how."""

    workers: int
    kills: frozenset[tuple[int, int]] = frozenset()
    restarts: bool = True
    recovery: Recovery = field(default_factory=lambda: Recovery(wait=30))
    strategy: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    alone_until: int | None = None
    """The step in which those who have gone on alone wait until the others are back."""
    asks: tuple[int, int] | None = None
    """Who asks for an end after which step, and dies once all have heard of it."""
    spots: Mapping[tuple[int, int], Spot] = field(default_factory=dict)
    """Where within a step somebody who is killed there dies."""
    begin: Callable[[], object] | None = None
    """What each process does first."""


class Killed(sp.Callback):
    """Kills its process once before each of the planned steps, and waits for who is not there."""

    def __init__(self, plan: Plan, rank: int, folder: Path) -> None:
        self.plan, self.rank, self.folder = plan, rank, folder

    def on_train_batch_begin(self, batch: int) -> None:
        at = self.rank, self.trainer.step
        if at in self.plan.spots and not (self.folder / f"killed {at[0]} {at[1]}").exists():
            self.plan.spots[at](partial(self.die_once, self.trainer.step))
        elif at in self.plan.kills:
            if self.plan.training.get("backup"):  # it is written beside the training
                assert eventually(lambda: any(self.folder.glob("backup/fit-1/step-*")))
            self.die_once()
        until, strategy = self.plan.alone_until, self.trainer.strategy
        if strategy.cluster.world_size < self.plan.workers and until is not None:
            # They come in after this step, however long their start took.
            assert self.trainer.step < until or eventually(
                lambda: strategy.engine.groups.somebody_waits
            )

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if self.plan.asks is None or self.rank != self.plan.asks[0]:
            return
        if self.trainer.step == self.plan.asks[1]:
            self.trainer.stop_training = True
        elif self.trainer.stop_training:
            self.die_once()

    def die_once(self, step: int | None = None) -> None:
        done = self.folder / f"killed {self.rank} {self.trainer.step if step is None else step}"
        if not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Losses(sp.Callback):
    """The loss of each step, as it came first."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}
        self.here = 0

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.here += 1
        loss = float(logs["loss"])
        self.seen.setdefault(str(self.trainer.step), -1.0 if isnan(loss) else loss)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def reporting(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that reports figures of its own."""
    log("confidence", output.softmax(1).amax(1))
    log("label", target.double())
    return nn.functional.cross_entropy(output, target, reduction="none")


def train(plan: Plan, rank: int, folder: Path) -> dict[str, Any]:
    options = dict(plan.strategy)
    cut = options.get("name") in ("mesh", "pipeline")
    given = {"optimizer": "Adam", "dropout": 0.3, "batch": 8, "accumulate": 1, **plan.training}
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.BatchNorm1d(8) if given.get("norm") else nn.Identity(),
        nn.Dropout(given["dropout"]), nn.Linear(8, 3),
    ).double()  # fmt: skip
    net[0].requires_grad_(not given.get("frozen"))
    losses, x, y = Losses(), *blobs(45)
    x[given.get("bad", [])] = nan
    with named_strategy(
        options.pop("name", "mirrored"), recovery=plan.recovery, **options
    ) as strategy:
        trainer = sp.Trainer(
            net,
            optimizer=lambda p: getattr(torch.optim, given["optimizer"])(
                p, lr=0.05, **given.get("options", {})
            ),
            loss=reporting if given.get("reports") else nn.CrossEntropyLoss(),
            metrics=given.get("metrics", ["accuracy"]),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4),
            accumulate=given["accumulate"],
            strategy=strategy,
            deterministic=bool(given.get("norm")),
            on_nonfinite="skip" if "bad" in given else "ignore",
            run_dir=folder / "run",
        )
        backups = (
            [sp.callbacks.BackupAndRestore(folder / "backup", 3, share=None)]
            if given.get("backup")
            else []
        )
        history = trainer.fit(
            (x, y), epochs=given.get("epochs", 3), batch_size=given["batch"],
            validation_data=(x[:20], y[:20]), verbose=False,
            callbacks=[
                losses, Killed(plan, rank, folder), sp.callbacks.ModelCheckpoint(every_steps=5),
                *backups,
            ],
        )  # fmt: skip
        model = strategy.state_dict()["model"] if cut else net.state_dict()
        weights = {name: value.clone() for name, value in model.items()}
        return {
            "history": history.history, "epochs": history.epoch, "losses": losses.seen,
            "weights": weights, "step": trainer.step, "tasks": strategy.cluster.world_size,
            "skips": trainer.skips.state_dict(),
            **({"here": losses.here} if backups else {}),
        }  # fmt: skip


def task(plan: Plan, rank: int, folder: Path, environment: dict[str, str], pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment)
    if plan.begin is not None:
        plan.begin()
    pipe.send_bytes(pickle.dumps(on_host(train(plan, rank, folder))))


def run(plan: Plan, folder: Path) -> list[Any]:
    """What each task returned in the end; None for one that was not started again."""
    folder.mkdir()
    server = Server(socket.create_server(("127.0.0.1", 0)), Key(SECRET.encode()))
    host, port = server.address
    pipes: dict[int, Any] = {}
    processes: dict[int, Any] = {}

    def start(rank: int) -> None:
        environment = {
            "RANK": str(rank), "WORLD_SIZE": str(plan.workers), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(plan.workers), "MASTER_ADDR": host, "MASTER_PORT": str(port),
            "SPARTITO_STORE": f"{host}:{port}", "SPARTITO_SECRET": SECRET,
            "SPARTITO_TIMEOUT": "20", "TF_CONFIG": "",
        }  # fmt: skip
        pipes[rank], theirs = context.Pipe()
        processes[rank] = context.Process(
            target=task, args=(plan, rank, folder, environment, theirs), daemon=True
        )
        processes[rank].start()
        theirs.close()

    found: list[Any] = [None] * plan.workers
    try:
        for rank in range(plan.workers):
            start(rank)
        end = time.monotonic() + LIMIT
        while pipes:
            ready = connection.wait(pipes.values(), max(0.0, end - time.monotonic()))
            assert ready, f"the job does not end:\n{stacks.of(_running(processes))}"
            for rank in [rank for rank, pipe in pipes.items() if pipe in ready]:
                pipe = pipes.pop(rank)
                try:
                    found[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    processes[rank].join()
                    assert processes[rank].exitcode == -signal.SIGKILL
                    if plan.restarts:
                        start(rank)
    finally:
        for process in processes.values():
            process.kill()
            process.join()
        server.close()
    return found


def _running(processes: Mapping[int, Any]) -> dict[str, int]:
    """The tasks that have not ended, by name."""
    return {f"worker {r}": one.pid for r, one in processes.items() if one.is_alive()}


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, torch.Tensor):
        yield from value.double().flatten().tolist()
    elif isinstance(value, dict):
        for name in sorted(value):
            yield from numbers(value[name])
    elif isinstance(value, list):
        for each in value:
            yield from numbers(each)
    else:
        yield float(value)


def difference(one: Any, other: Any) -> float:
    """The largest difference of two results that have the same shape."""
    pairs = zip(list(numbers(one)), list(numbers(other)), strict=True)
    return max(abs(left - right) for left, right in pairs)


def without(result: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in names}


SCRIPTS: list[tuple[str, Plan]] = [
    (
        "memory",
        Plan(
            2,
            frozenset({(1, 2), (0, 7)}),
            training={"accumulate": 2, "metrics": ["accuracy", "confusion_matrix"], "norm": True,
                      "reports": True},
        ),
    ),
    (
        "sockets",
        Plan(
            3,
            frozenset({(0, 4), (2, 11)}),
            strategy={
                "name": "multi_worker_mirrored", "communication": "sockets", "bucket_bytes": 64
            },
            asks=(1, 14),
            training={"bad": [30], "reports": True},
        ),
    ),
    (
        "pipeline",
        Plan(
            4,
            frozenset({(3, 4), (0, 7)}),
            strategy={"name": "pipeline", "stages": 2, "microbatches": 2, "split": ["3"]},
            training={"accumulate": 2, "metrics": ["accuracy", "confusion_matrix"]},
        ),
    ),
    (
        "mesh",
        Plan(
            4,
            frozenset({(3, 4), (0, 7)}),
            strategy={"name": "mesh", "model": 2},
            training={"accumulate": 2, "metrics": ["accuracy", "confusion_matrix"]},
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize("plan", [plan for _, plan in SCRIPTS], ids=[name for name, _ in SCRIPTS])
def test_the_chief_and_a_worker_are_killed_and_replaced(plan: Plan, tmp_path: Path) -> None:
    """Everything is bitwise as if nobody had died, on every task, and in the files."""
    killed = run(plan, tmp_path / "killed")
    expected = run(
        Plan(plan.workers, strategy=plan.strategy, training=plan.training), tmp_path / "whole"
    )
    kills = len(plan.kills) + (plan.asks is not None)
    assert len(list((tmp_path / "killed").glob("killed *"))) == kills
    for result in killed:
        assert difference(result, expected[0]) == 0.0
        assert result["skips"]["total"] == (3 if "bad" in plan.training else 0)  # one an epoch
    for name in ("killed", "whole"):
        lines = (tmp_path / name / "run" / "history.jsonl").read_text().splitlines()
        assert len(lines) == 3
        saved = sorted(path.name for path in (tmp_path / name / "run" / "checkpoints").glob("s*"))
        assert saved == sorted(
            path.name for path in (tmp_path / "whole" / "run" / "checkpoints").glob("s*")
        )


def test_the_others_go_on_alone_and_take_in_who_comes_later(tmp_path: Path) -> None:
    """The global batch stays global: 2, then 1 (the chief is gone), then 2 tasks."""
    training = {"optimizer": "SGD", "dropout": 0.0, "epochs": 12}
    alone = Recovery(min_workers=1, wait=0.1)
    plan = Plan(2, frozenset({(0, 5)}), recovery=alone, training=training, alone_until=20)
    later = run(plan, tmp_path / "later")
    expected = run(Plan(2, training=training), tmp_path / "whole")[0]
    assert [result["tasks"] for result in later] == [2, 2]
    for result in later:
        assert difference(without(result, "tasks"), without(expected, "tasks")) <= 1e-12


def test_all_are_killed_and_go_on_from_a_backup(tmp_path: Path) -> None:
    """Nobody is left who has the state."""
    training = {"backup": True}
    killed = run(Plan(2, frozenset({(0, 8), (1, 8)}), training=training), tmp_path / "killed")
    expected = run(Plan(2, training=training), tmp_path / "whole")[0]
    assert expected["here"] == expected["step"]
    for result in killed:
        assert result["here"] < expected["here"]
        assert difference(without(result, "here"), without(expected, "here")) == 0.0


def test_a_third_less_of_the_tasks_gives_the_same_numbers(tmp_path: Path) -> None:
    """Deterministic, with dropout and BatchNorm: the numbers are those of any number of tasks."""
    training = {"norm": True, "optimizer": "SGD", "batch": 9}
    fewer = Plan(3, frozenset({(0, 8)}), False, Recovery(2, 0.1), training=training)
    chief, *others = run(fewer, tmp_path / "fewer")
    expected = run(Plan(3, training=training), tmp_path / "whole")[0]
    assert chief is None
    assert [result["tasks"] for result in others] == [2, 2]
    for result in others:
        assert difference(without(result, "tasks"), without(expected, "tasks")) <= 1e-12


def test_replicas_without_rows_report_nothing(tmp_path: Path) -> None:
    plan = Plan(2, training={"reports": True, "batch": 22, "epochs": 1})  # the last batch has a row
    for found in run(plan, tmp_path / "job"):
        assert found["history"]["label"] == [pytest.approx(blobs(45)[1].double().mean().item())]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mirrored", {"communication": "ddp"}),
        ("multi_worker_mirrored", {"compress": "bf16"}),
        ("mirrored", {"recovery": Recovery(min_workers=3)}),
    ],
)
def test_what_cannot_recover_is_refused(name: str, options: dict[str, Any]) -> None:
    given = {"recovery": Recovery(), **options}
    with pytest.raises(UserError, match=r"with recovery|recovery with|min_workers=3"):
        _ = strategy_info(name).load()(cluster=spec(0, 2, 29500), **given).engine


def test_a_launcher_that_asks_for_recovery_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARTITO_RECOVERY", "min_workers=1")
    for name in ("mirrored", "multi_worker_mirrored", "sharded"):
        strategy = strategy_info(name).load()(cluster=spec(0, 2, 29500))
        assert strategy.engine.team.recovery == Recovery(min_workers=1), name
        strategy.close()


def own_loop(recovery: Recovery | None) -> tuple[float, float]:
    """What a loop of the user's own draws and learns."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3)).double()
    with named_strategy("mirrored", recovery=recovery) as strategy:
        model, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for number, batch in enumerate(strategy.distribute(sp.data.arrays(*blobs(16)).batch(8))):
            if number:
                strategy.step(batch, nn.CrossEntropyLoss())
            else:
                losses = nn.functional.cross_entropy(
                    model(batch.data[0]), batch.data[1], reduction="none"
                )
                strategy.backward(losses, batch)
                strategy.update(optimizer)
        return float(torch.rand(())), sum(float(p.detach().sum()) for p in net.parameters())


def test_a_loop_of_ones_own_is_as_without_recovery(replicas: Replicas) -> None:
    ways = replicas(own_loop, 2, Recovery()), replicas(own_loop, 2, None)
    for (drawn, learned), (expected, plain) in zip(*ways, strict=True):
        assert drawn == expected
        assert learned == pytest.approx(plain, rel=1e-12)


def stand_elsewhere() -> str:
    with named_strategy("mirrored", recovery=Recovery()) as strategy:
        own = Standing((0,), False, fit=1 + strategy.cluster.rank, pairs=0)
        try:
            share_state(strategy.engine.groups.data, [], own, dict)
        except ElsewhereError as error:
            return str(error)
    return "nothing"


def test_a_task_that_runs_another_fit_is_not_let_in(replicas: Replicas) -> None:
    for text in replicas(stand_elsewhere, 2):
        assert "worker 1 came back in its fit number 2" in text
