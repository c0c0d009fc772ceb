"""Jobs with parameter servers: what their tasks run, and real processes that tests may kill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spartito as sp
from spartito.checkpoint.manager import CheckpointManager
from spartito.data.batch import Batch
from spartito.ps.client.vector import SpanCopies, Vector
from spartito.ps.protocol.layout import cut
from spartito.ps.protocol.slots import is_elementwise
from spartito.ps.server.shard import Shard
from spartito.ps.server.update_log import replay
from spartito.recipes.options import CHECKPOINTS, Options, go_on
from spartito.strategies import strategy as make_strategy
from tests.replicas import warns
from tests.strategies.jobs import CLASSES, FEATURES, blobs

LIMIT = 120.0  # seconds that no passing test comes near
FINE = 16  # bytes: the small models of these tests fill several servers


class Whole(torch.optim.Optimizer):
    """Sets a matrix on its way by the direction of its whole gradient, as Muon does."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is not None and grad.dim() == 2:
                    u, _, v = torch.linalg.svd(grad, full_matrices=False)
                    parameter.sub_(u @ v, alpha=group["lr"])
                elif grad is not None:
                    parameter.sub_(grad, alpha=group["lr"])


class Counting(torch.optim.SGD):
    """Counts its updates in its groups, as Prodigy and schedule-free optimizers do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            group["k"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["k"] += 1


OWN = {"Whole": Whole, "Counting": Counting}


@dataclass(frozen=True)
class Asked:
    """What a job is to do. ``holds`` maps a task to the batches in which it waits to be told."""

    strategy: str = "parameter_server"
    options: dict[str, Any] = field(default_factory=dict)
    norm: bool = False
    momentum: float = 0.1
    deterministic: bool = False
    stream: bool = False
    own_loop: bool = False
    optimizer: str = "Adam"
    rate: float = 0.02
    examples: int = 96
    batch: int = 8
    epochs: int = 3
    fits: int = 1
    steps: int | None = None
    accumulate: int = 1
    clip: float | None = None
    schedule: str = ""
    callbacks: str = ""
    validation: bool = False
    width: int = 8
    holds: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict)
    fails: str = ""
    lives: bool = False
    spoiled: Mapping[str, Sequence[int]] = field(default_factory=dict)
    broken: str = ""
    run_dir: str | None = None
    checkpoints: str = ""
    load: str = ""
    recipe: bool = False

    @property
    def plan(self) -> int:
        """Global batches of all that is asked for."""
        return self.epochs * self.fits * (self.steps or -(-self.examples // self.batch))


def network(asked: Asked) -> nn.Module:
    torch.manual_seed(3)
    norm = [nn.BatchNorm1d(asked.width, momentum=asked.momentum)] if asked.norm else []
    return nn.Sequential(
        nn.Linear(FEATURES, asked.width), *norm, nn.ReLU(), nn.Linear(asked.width, CLASSES)
    )


def make_optimizer(asked: Asked, net: nn.Module) -> torch.optim.Optimizer:
    kind = OWN.get(asked.optimizer) or getattr(torch.optim, asked.optimizer)
    made: torch.optim.Optimizer = kind(net.parameters(), lr=asked.rate)
    return made


class Stop(sp.Callback):
    """Asks for the end in step 7."""

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.trainer.stop_training |= self.trainer.step >= 7


def callbacks(asked: Asked) -> list[sp.Callback]:
    known: dict[str, list[sp.Callback]] = {
        "": [],
        "stop": [Stop()],
        "early": [sp.callbacks.EarlyStopping(monitor="loss", patience=0, min_delta=100.0)],
        "save": [sp.callbacks.ModelCheckpoint(asked.checkpoints)],
        "often": [sp.callbacks.ModelCheckpoint(asked.checkpoints, every_steps=3)],
        "backup": [sp.callbacks.BackupAndRestore(asked.checkpoints or None, every=2, share=None)],
    }
    return known[asked.callbacks]


def schedule(asked: Asked) -> Any:
    return {
        "": None,
        "steps": lambda o: torch.optim.lr_scheduler.StepLR(o, 4, 0.5),
        "cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=asked.plan),
        "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(
            o, factor=0.5, patience=0, threshold=1e6
        ),
    }[asked.schedule]


class Stream(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._pairs = list(zip(x, y, strict=True))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._pairs)


class Loss:
    """Cross entropy, which waits in one batch of a task, and is not a number in some."""

    def __init__(self, asked: Asked, task: str, wait: Callable[[], None]) -> None:
        holds = asked.holds.get(task, ())
        self._holds = (holds,) if isinstance(holds, int) else holds
        self._spoiled = asked.spoiled.get(task, ())
        self._fails = asked.fails == task
        self._wait, self._count = wait, 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(output, target)
        if output.grad_fn is not None:  # of the model: this batch is trained on
            self._count += 1
            if self._count in self._holds:
                self._wait()
            if self._count == 5 and self._fails:
                raise ValueError("no such class\nin these rows")
            if self._count in self._spoiled:
                loss = loss * float("nan")
        return loss


class Seen(sp.Callback):
    """Counts the batches after which a callback was shown a loss that is not a number."""

    nans = 0

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        self.nans += "loss" in list(logs) and isnan(logs["loss"])


@warns("unclosed file", "the learning rate fell")  # pushes are recorded until the process ends
def train(asked: Asked, wait: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Train as asked on blobs; what each task has in the end."""
    strategy = make_strategy(asked.strategy, **asked.options)
    x, y = blobs(asked.examples, torch.float32)
    data = sp.data.as_dataset(Stream(x, y), asked.batch) if asked.stream else (
        sp.data.arrays(x, y).shuffle().batch(asked.batch)
    )  # fmt: skip
    if str(strategy.task) == asked.broken:
        asked = Asked(**{**asked.__dict__, "width": asked.width + 1})
    net = network(asked)
    loss = Loss(asked, str(strategy.task), wait)
    if asked.own_loop:
        return _own_loop(asked, strategy, net, data, loss)
    trainer = sp.Trainer(
        net,
        optimizer=make_optimizer(asked, net),
        loss=loss,
        metrics=["accuracy"],
        strategy=strategy,
        scheduler=schedule(asked),
        accumulate=asked.accumulate,
        clip_norm=asked.clip,
        deterministic=asked.deterministic,
        seed=11,
        on_nonfinite="skip" if asked.spoiled else "ignore",
        run_dir=asked.run_dir,
    )
    if asked.load:
        trainer.load(asked.load)
    if asked.recipe:  # which goes on from what is there, where it may
        assert trainer.run_dir is not None
        there = bool(CheckpointManager(trainer.run_dir / CHECKPOINTS).all())
        go_on(trainer, Options(None, 1, None, 8, 0, "fp32", resume=there, json=False))
    histories, seen = [], Seen()
    for _ in range(asked.fits):
        history = trainer.fit(
            data,
            epochs=asked.epochs,
            steps_per_epoch=asked.steps,
            callbacks=[seen, *callbacks(asked)],
            validation_data=(x, y) if asked.validation else None,
            verbose=0,
        )
        histories.append(history.history)
    evaluated = trainer.evaluate((x, y), batch_size=16)
    if strategy.is_evaluator:
        strategy.close()
        return {"histories": histories, "evaluated": evaluated}
    state = {name: value.clone() for name, value in net.state_dict().items()}
    result = {
        "histories": histories,
        "weights": state,
        "evaluated": evaluated,
        "predictions": trainer.predict(x[:5], batch_size=2),
        "lr": trainer.optimizer.param_groups[0]["lr"],
        "steps": trainer.step,
        "nans": seen.nans,
    }
    strategy.close()
    return result


def _own_loop(
    asked: Asked, strategy: sp.Strategy, net: nn.Module, data: Any, loss: Loss
) -> dict[str, Any]:
    model, optimizer = strategy.prepare(net, make_optimizer(asked, net))
    assert optimizer is not None
    batches = strategy.distribute(data)
    seen = 0
    for _ in range(asked.epochs):
        for batch in batches:
            assert isinstance(batch, Batch)
            losses = nn.functional.cross_entropy(model(batch.x), batch.y, reduction="none")
            loss(model(batch.x), batch.y)  # counts, and waits where it is told to
            strategy.backward(losses, batch)
            strategy.update(optimizer)
            seen += batch.size
    strategy.synchronize()
    result = {
        "weights": {name: value.clone() for name, value in net.state_dict().items()},
        "seen": seen,
    }
    strategy.close()
    return result


def with_servers(options: dict[str, Any], **servers: Any) -> dict[str, Any]:
    """Options of a job with what is asked of its servers, where they do not say another thing."""
    return {**options, "servers": {**servers, **options.get("servers", {})}}


def replayed(asked: Asked, folder: Path, servers: int) -> dict[str, Tensor]:
    """The weights that the updates in the push logs of ``folder`` make, from the beginning."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        net = network(asked)
        vector = Vector(net, make_optimizer(asked, net))
        whole = asked.optimizer in OWN
        fine = asked.options.get("servers", {}).get("min_shard_bytes", 256 << 10)
        for number, span in enumerate(cut(vector.layout, servers, fine, whole)):
            optimizer = make_optimizer(asked, net)
            assert is_elementwise(optimizer) is not whole
            for group in optimizer.param_groups:
                group["fused"] = not whole  # as strategies choose it on a CPU
            shard = Shard(vector.layout, span, optimizer, vector.tensors)
            SpanCopies(vector, span, shard.values).store()
            replay(folder / f"ps-{number}.log", shard)
            SpanCopies(vector, span, shard.values).load()
        return net.state_dict()
    finally:
        torch.set_num_threads(threads)
