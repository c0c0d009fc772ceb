"""What the contract tests run on every replica; each returns plain values to compare."""

from __future__ import annotations

import gc
import os
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import spartito as sp
from spartito.data.batch import Batch
from spartito.errors import CorruptSampleError
from spartito.registry import StrategyInfo
from spartito.strategies import Strategy
from spartito.strategies import strategy as named_strategy

DEVICE = os.environ.get("SPARTITO_TEST_DEVICE", "cpu")
"""Where the contracts of the strategies are tested: "cpu", or "cuda" for each replica's own GPU."""


def make_strategy(name: str | None = None, **options: Any) -> Strategy:
    """A strategy by its name, or by the path of its class: ``"package.module:Class"``."""
    if DEVICE == "cpu" and torch.cuda.is_available():
        options.setdefault("device", "cpu")
    if name and ":" in name:
        made: Strategy = StrategyInfo(name, name).load()(**options)
        return made
    return named_strategy(name, **options)


def weights(strategy: Strategy, net: nn.Module, optimizer: Any = None) -> dict[str, Tensor]:
    """All parameters and buffers of ``net``, also where no task has the whole of them.

    ``optimizer`` is the one that was prepared with it, where the strategy has several.
    """
    if strategy.name == "parameter_server":  # each task has its own
        return {name: value.clone() for name, value in net.state_dict().items()}
    with strategy.using(optimizer) if optimizer is not None else nullcontext():
        state: dict[str, Tensor] = strategy.state_dict()["model"]
        return {name: value.clone() for name, value in state.items()}


FEATURES, CLASSES = 6, 3


def blobs(count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Examples of three classes that a small network can tell apart."""
    generator = torch.Generator().manual_seed(7)
    y = torch.arange(count) % CLASSES
    centres = torch.eye(CLASSES, FEATURES, dtype=dtype) * 2
    return centres[y] + torch.randn(count, FEATURES, generator=generator, dtype=dtype), y


def mlp(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, CLASSES)
    ).double()


class Convolutions(nn.Module):
    """A small network with all that makes equality hard: BatchNorm, dropout, residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x / 255)))
        x = x + torch.relu(self.norm2(self.second(x)))
        out: Tensor = self.head(self.drop(x.mean((2, 3))))
        return out


def fit_mlp(
    name: str,
    options: dict[str, Any],
    *,
    examples: int = 50,
    batch: int = 8,
    epochs: int = 2,
    steps: int | None = None,
    optimizer: str = "Adam",
    accumulate: int = 1,
    clip: float | None = None,
    dropout: float = 0.0,
    loss: str = "mean",
    schedule: bool = False,
) -> dict[str, Any]:
    """History, weights and predictions of a network trained on blobs."""
    strategy = make_strategy(name, **options)
    net = mlp(dropout)
    losses: dict[str, Any] = {
        "mean": nn.CrossEntropyLoss(),
        "each": nn.CrossEntropyLoss(reduction="none"),
        "weighted": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]).double()),
        "sum": lambda out, y: (nn.functional.cross_entropy(out, y, reduction="sum"), len(y)),
    }
    trainer = sp.Trainer(
        net,
        optimizer=lambda parameters: getattr(torch.optim, optimizer)(parameters, lr=0.02),
        loss=losses[loss],
        metrics=["accuracy", "top_2_accuracy"],
        strategy=strategy,
        scheduler=(lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.7)) if schedule else None,
        accumulate=accumulate,
        clip_norm=clip,
        deterministic=True,
        seed=11,
    )
    x, y = blobs(examples)
    train = sp.data.arrays(x, y).shuffle().batch(batch)
    val = sp.data.arrays(x[:13], y[:13]).batch(5)
    history = trainer.fit(
        train, epochs=epochs, steps_per_epoch=steps, validation_data=val, verbose=0
    )
    again = trainer.fit(train, epochs=1, steps_per_epoch=steps, verbose=0)
    result = {
        "history": history.history,
        "again": again.history,
        "weights": weights(strategy, net),
        "predictions": trainer.predict(x[:7], batch_size=3),
        "lr": trainer.optimizer.param_groups[0]["lr"],
        "steps": trainer.step,
    }
    strategy.close()
    return result


def fit_metrics(name: str, options: dict[str, Any], kind: str) -> dict[str, Any]:
    """History and last predictions of a training with metrics that keep a state."""
    strategy = make_strategy(name, **options)
    net = mlp()
    metrics: list[Any] = ["auc", "pr_auc", "f1", "precision_weighted", "confusion_matrix"]
    if kind == "torchmetrics":
        import torchmetrics
        from torchmetrics import classification

        metrics = [
            classification.MulticlassF1Score(CLASSES, average="macro"),
            classification.MulticlassAUROC(CLASSES),
            sp.metrics.TorchMetric(torchmetrics.MaxMetric(), inputs=lambda out, y: (out,)),
            sp.metrics.TorchMetric(
                torchmetrics.PearsonCorrCoef().set_dtype(torch.float64),
                inputs=lambda out, y: (out[:, 0], y.double()),
            ),
        ]
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy", *metrics],
        strategy=strategy,
        deterministic=True,
    )
    x, y = blobs(29)
    data = sp.data.arrays(x, y)
    halving = sp.callbacks.LearningRateScheduler(lambda epoch, rate: 0.2 / 2**epoch)
    history = trainer.fit(
        data.shuffle().batch(7),
        epochs=2,
        validation_data=data.batch(5),
        callbacks=[halving],
        verbose=0,
    )
    result = {"history": history.history, "predictions": trainer.predict(x)}
    strategy.close()
    return result


def fit_convolutions(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Synchronized BatchNorm, dropout and augmentation; the last batch has one example."""
    strategy = make_strategy(name, **options)
    torch.manual_seed(5)
    net = Convolutions().double()
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(25, 3, 9, 9, generator=generator, dtype=torch.float64) * 255
    y = (x[:, 0].mean((1, 2)) > 127).long()
    train = (
        sp.data.arrays(x, y)
        .shuffle()
        .map(sp.data.RandomFlip("horizontal"))
        .map(sp.data.RandomRotation(0.1))
        .batch(6)
        .prefetch(2)
    )
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.Adam(net.parameters(), 1e-2),
        loss=nn.BCEWithLogitsLoss(),
        metrics=["accuracy", "mean_absolute_error"],
        strategy=strategy,
        deterministic=True,
    )
    history = trainer.fit(train, epochs=3, validation_data=(x, y), verbose=0)
    state = weights(strategy, net)
    strategy.close()
    return {"history": history.history, "weights": state}


def checkpoint_and_resume(
    name: str,
    options: dict[str, Any],
    folder: str,
    phase: str,
    again: str = "",
    accumulate: int = 1,
) -> dict[str, Any]:
    """Train 2 of 4 epochs and a half and save ("save"), go on ("resume"), or all ("whole").

    What was loaded is saved as ``again`` at once; "copy" does no more than that. With
    ``accumulate`` 2 that is in the middle of an update.
    """
    strategy = make_strategy(name, **options)
    net = mlp(0.3)
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.AdamW(net.parameters(), 0.02),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy", "auc", "f1_micro"],
        strategy=strategy,
        scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.97),
        accumulate=accumulate,
        deterministic=True,
        seed=4,
    )
    train = sp.data.arrays(*blobs(40)).shuffle().batch(8)

    class SaveInTheMiddle(sp.Callback):
        saved = False

        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            here = self.trainer.step >= 12 if accumulate == 1 else batch >= 2  # or soon after it
            if phase == "save" and self.trainer.epoch == 2 and here and not self.saved:
                self.saved = True
                self.trainer.save(folder)
                self.trainer.stop_training = True

    if phase in ("resume", "copy"):
        trainer.load(folder)
        if again:
            trainer.save(again)
    if phase == "copy":
        strategy.close()
        return {}
    history = trainer.fit(train, epochs=4, callbacks=[SaveInTheMiddle()], verbose=0)
    result = {
        "history": history.history,
        "epochs": history.epoch,
        "weights": weights(strategy, net),
    }
    strategy.close()
    return result


def load_each(
    name: str, options: dict[str, Any], given: Sequence[tuple[str, str, str]]
) -> list[dict[str, Any]]:
    """Load each of these checkpoints in turn: folder, phase, and where it is saved again.

    Each time into a model and an optimizer that are new, so that nothing of the one before is left.
    """
    return [
        checkpoint_and_resume(name, options, folder, phase, again) for folder, phase, again in given
    ]


def gan(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """A custom loop with two models and two optimizers."""
    strategy = make_strategy(name, **options)
    torch.manual_seed(2)
    generator_net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    critic = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    g, g_opt = strategy.prepare(generator_net, torch.optim.Adam(generator_net.parameters(), 1e-2))
    d, d_opt = strategy.prepare(critic, torch.optim.Adam(critic.parameters(), 1e-2))
    assert g_opt is not None
    assert d_opt is not None
    source = torch.Generator().manual_seed(9)
    real = torch.randn(22, 2, generator=source, dtype=torch.float64) + 3
    noise = torch.randn(22, 2, generator=source, dtype=torch.float64)
    loss = nn.BCEWithLogitsLoss(reduction="none")
    curve = []
    data = strategy.distribute(sp.data.arrays(real, noise).shuffle(3).batch(5))
    for _ in range(3):
        for batch in data:
            fake = g(batch.y)
            d_opt.zero_grad()
            judged = torch.cat([d(batch.x), d(fake.detach())], 1)
            d_losses = loss(judged, torch.tensor([1.0, 0.0]).double().expand_as(judged))
            strategy.backward(d_losses, batch)
            strategy.update(d_opt)
            g_losses = loss(d(fake), torch.ones(batch.size, 1).double())
            strategy.backward(g_losses, batch)
            strategy.update(g_opt)
            both = torch.stack([d_losses.mean(1), g_losses.mean(1)], 1)
            curve.append(strategy.reduce("mean", both).item())
    result = {
        "curve": curve,
        "weights": {
            **_named("g", weights(strategy, generator_net, g_opt)),
            **_named("d", weights(strategy, critic, d_opt)),
        },
    }
    strategy.close()
    return result


def _named(prefix: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": value for name, value in values.items()}


class Sometimes(nn.Module):
    """``rare`` is used only for inputs above a limit, ``never`` not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(2, 1).double()
        self.rare = nn.Linear(2, 1).double()
        self.never = nn.Linear(2, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.always(x)
        high = x[:, 0] > 5
        return out + self.rare(x) * high[:, None] if high.any() else out


def unused_parameters(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """One step in which a parameter is used on some replicas only, and one on none."""
    strategy = make_strategy(name, **options)
    torch.manual_seed(1)
    net = Sometimes()
    before = net.never.weight.detach().clone()
    net2, optimizer = strategy.prepare(net, torch.optim.AdamW(net.parameters(), 0.1))
    assert optimizer is not None
    x = torch.arange(12.0).double().view(6, 2)
    for batch in strategy.distribute(sp.data.arrays(x, x[:, :1]).batch(6)):
        strategy.backward((net2(batch.x) - batch.y).square(), batch)
        strategy.update(optimizer)
    found = weights(strategy, net)
    state = {name: found[f"{name}.weight"] for name in ("always", "rare")}
    unchanged = torch.equal(before, found["never.weight"])
    kept = unchanged and net.never.weight not in optimizer.state
    strategy.close()
    return {"weights": state, "kept": kept}


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, features: Tensor, label: Tensor) -> dict[str, Tensor]:
        out = self.net(features)
        return {"loss": nn.functional.cross_entropy(out, label), "output": out}


def dict_batches(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Batches that are dicts, and a model that returns its own loss."""
    strategy = make_strategy(name, **options)
    net = OwnLoss()
    trainer = sp.Trainer(net, optimizer=torch.optim.SGD(net.parameters(), 0.1), strategy=strategy)
    x, y = blobs(20)
    data = {"features": x, "label": y}
    history = trainer.fit(data, epochs=2, batch_size=7, validation_data=data, verbose=0)
    predicted = trainer.predict(data, batch_size=6)["output"]
    strategy.close()
    return {"history": history.history, "weights": {"out": predicted}}


class Faulty:
    """Eleven examples, of which two cannot be read."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in (2, 7):
            raise CorruptSampleError(f"example {index} is broken")
        x, y = blobs(11)
        return x[index], y[index]


def corrupt_examples(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Examples that cannot be read keep their index with weight 0."""
    strategy = make_strategy(name, **options)
    net = mlp(0.5)
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        strategy=strategy,
        deterministic=True,
    )
    history = trainer.fit(sp.data.as_dataset(Faulty(), 4).shuffle(), epochs=3, verbose=0)
    result = {
        "history": history.history,
        "weights": weights(strategy, net),
    }
    strategy.close()
    return result


def streams(name: str, options: dict[str, Any], kind: str) -> dict[str, Any]:
    """An IterableDataset, a DataLoader, and a DataLoader with a sampler of its own."""
    strategy = make_strategy(name, **options)
    net = mlp()
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
    )
    x, y = blobs(19)
    pairs = torch.utils.data.TensorDataset(x, y)

    class Stream(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return iter(pairs)

    made: dict[str, Any] = {
        "iterable": lambda: Stream(),
        "dataset": lambda: pairs,
        "loader": lambda: torch.utils.data.DataLoader(pairs, batch_size=4, shuffle=True),
        "sampler": lambda: torch.utils.data.DataLoader(
            pairs, batch_sampler=[[0, 1, 2], [5, 4, 3, 9], [11]]
        ),
    }
    history = trainer.fit(made[kind](), epochs=2, batch_size=4, verbose=0)
    result = {
        "history": history.history,
        "weights": weights(strategy, net),
    }
    strategy.close()
    return result


def uneven_workers(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Each replica makes its own batches, and not equally many."""
    strategy = make_strategy(name, **options)
    net = mlp()

    def batches(context: sp.data.InputContext) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = blobs(30)
        mine = slice(context.data_shard[0], None, context.data_shard[1])
        for start in range(0, 4 * (context.data_shard[0] + 1), 4):
            yield x[mine][start : start + 4], y[mine][start : start + 4]

    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
    )
    history = trainer.fit(sp.data.per_worker(batches), epochs=2, verbose=0)
    result = {"steps": trainer.step, "history": history.history}
    strategy.close()
    return result


def stop_by_one(name: str, options: dict[str, Any]) -> int:
    """The last replica alone asks for an end in step 4; returns the steps that were made."""
    strategy = make_strategy(name, **options)
    net = mlp()

    class Stop(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            last = strategy.cluster.rank == strategy.num_replicas_in_sync - 1
            self.trainer.stop_training |= last and self.trainer.step >= 4

    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
    )
    trainer.fit(blobs(200), epochs=3, batch_size=8, callbacks=[Stop()], verbose=0)
    strategy.close()
    return trainer.step


def low_precision(name: str, options: dict[str, Any], compiled: bool) -> dict[str, Any]:
    """bf16 autocast on a float32 network, also as a compiled module."""
    strategy = make_strategy(name, **options)
    net: Any = mlp().float()
    if compiled:
        net = torch.compile(net, backend="eager")
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.Adam(net.parameters(), 0.02),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        strategy=strategy,
        precision="bf16",
    )
    history = trainer.fit(blobs(60), epochs=3, batch_size=12, verbose=0)  # float64 data
    names = list(strategy.state_dict()["model"])
    strategy.close()
    return {"history": history.history, "names": names}


def facts(name: str, options: dict[str, Any]) -> tuple[int, bool, str, list[float]]:
    """What a strategy says of itself, and its reductions."""
    strategy: Strategy = make_strategy(name, **options)
    value = torch.tensor([float(strategy.cluster.rank + 1)], dtype=torch.float64)
    reduced = [strategy.reduce(op, value).item() for op in ("sum", "mean", "max", "min")]
    rows = strategy.gather(torch.full((strategy.cluster.rank + 1, 2), strategy.cluster.rank))
    result = (strategy.num_replicas_in_sync, strategy.is_chief, str(strategy.task), reduced)
    assert rows.tolist() == [[r, r] for r in range(result[0]) for _ in range(r + 1)]
    strategy.close()
    return result


def local_shares(batch: Batch) -> tuple[int, list[int]]:
    return batch.size, np.asarray(batch.offsets).tolist()


def write_model(name: str, options: dict[str, Any], folder: str) -> dict[str, Any]:
    """A checkpoint written by `ModelCheckpoint` during a fit."""
    strategy = make_strategy(name, **options)
    net = mlp()
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.Adam(net.parameters(), 0.02),
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
        run_dir=Path(folder),
    )
    trainer.fit(blobs(32), epochs=3, callbacks=[sp.callbacks.ModelCheckpoint(keep=2)], verbose=0)
    strategy.close()
    return trainer.history.history


def best_weights(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """A training that gets worse, with its rate halved by each epoch: what each task ends with."""
    strategy = make_strategy(name or None, **options)
    x, y = blobs(48)
    net = mlp()
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.Adam(net.parameters(), 0.01, maximize=True),
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        scheduler_interval="epoch",
    )
    early = sp.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    history = trainer.fit(
        (x, y), epochs=9, batch_size=8, validation_data=(x, y), callbacks=[early], verbose=0
    )
    result = {
        "val_loss": history.history["val_loss"],
        "evaluated": trainer.evaluate((x, y))["loss"],
        "lr": strategy.coordination.publish(lambda: trainer.optimizer.param_groups[0]["lr"]),
        "begun": strategy.coordination.publish(
            lambda: len(strategy.state_dict()["optimizer"]["state"])
        ),
    }
    strategy.close()
    return result


def chief_alone(name: str, options: dict[str, Any], act: str, folder: str) -> str:
    """The error of a fit in which a callback does something on the chief that all have to do."""
    strategy = make_strategy(name, **options)
    net = mlp()
    data = blobs(200)

    class Act(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            acts: dict[str, Callable[[], object]] = {
                "evaluate": lambda: trainer.evaluate(data),
                "save": lambda: trainer.save(folder),
            }
            if strategy.is_chief and trainer.step == 2:
                acts[act]()

    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
    )
    try:
        trainer.fit(data, epochs=3, batch_size=8, callbacks=[Act()], verbose=0)
    except sp.UserError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        strategy.close()
    return "trained"


def save_and_load(name: str, options: dict[str, Any], folder: str) -> tuple[list[float], str, str]:
    """What every load after a save of 1, 2, 3 finds; the errors where the last replica reads
    another checkpoint than the rest, and where it finds none.
    """
    strategy = make_strategy(name, **options)
    net = mlp()
    trainer = sp.Trainer(net, optimizer=torch.optim.SGD(net.parameters(), 0.1), strategy=strategy)

    def put(value: float) -> None:
        state = dict(net.state_dict())
        strategy.load({"model": {**state, "0.bias": torch.full_like(state["0.bias"], value)}})

    found = []
    for value in (1.0, 2.0, 3.0):
        put(value)
        strategy.coordination.tell_all("")
        trainer.save(f"{folder}/{value}")
        trainer.save(f"{folder}/newest")
        put(0.0)
        trainer.load(f"{folder}/newest")
        found.append(net.state_dict()["0.bias"][0].item())
        strategy.coordination.tell_all("")
    last = strategy.cluster.rank == strategy.num_replicas_in_sync - 1
    errors = []
    for path in (f"{folder}/{2.0 if last else 1.0}", f"{folder}/{'none' if last else 1.0}"):
        try:
            trainer.load(path)
            errors.append("")
        except sp.UserError as error:
            errors.append(str(error))
    strategy.close()
    return found, errors[0], errors[1]


class Lengths(torch.utils.data.Dataset[Tensor]):
    """Rows of these lengths, which `pad` makes equal in a data shard."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(1.0, self.lengths[index] + 1, dtype=torch.float64)


def pad(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def predict_lengths(name: str, options: dict[str, Any], lengths: list[int], batch: int) -> Any:
    """Predictions that are as long as their input, or the error."""
    strategy = make_strategy(name, **options)
    trainer = sp.Trainer(nn.Tanhshrink(), loss=nn.MSELoss(), strategy=strategy)
    loader = torch.utils.data.DataLoader(Lengths(lengths), batch_size=batch, collate_fn=pad)
    try:
        return trainer.predict(loader)
    except sp.UserError as error:
        return str(error)
    finally:
        strategy.close()


def drift(name: str, options: dict[str, Any], what: str) -> tuple[int, str]:
    """The step and the error where the last replica alone changes something after step 2."""
    strategy = make_strategy(name, **options)
    last = strategy.cluster.rank == strategy.num_replicas_in_sync - 1
    net = mlp()

    class Change(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if last and what == "value" and trainer.step == 2:
                bias: Tensor = net[0].bias  # type: ignore[index]
                bias.data = bias.data + 1e-9
            if last and what == "frozen" and trainer.step == 2:
                next(net.parameters()).requires_grad_(False)

    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
        loss=nn.CrossEntropyLoss(),
        strategy=strategy,
        seed=int(last and what == "seed"),
    )
    try:
        trainer.fit(
            sp.data.arrays(*blobs(20)).shuffle().batch(5),
            epochs=2,
            callbacks=[Change()],
            verbose=0,
        )
        return trainer.step, ""
    except sp.UserError as error:
        return trainer.step, str(error)
    finally:
        strategy.close()


class Tagger(nn.Module):
    """As models of transformers: keywords in, a mapping out, its loss a mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor) -> UserDict[str, Any]:
        logits = self.head(self.embed(input_ids))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return UserDict(loss=loss, logits=logits, num_items=(labels != -100).sum())


class Sentences(torch.utils.data.Dataset[Any]):
    """Lists of 1 to 5 tokens."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> UserDict[str, Any]:
        tokens = [(index * 5 + n) % 9 for n in range(1 + index % 5)]
        return UserDict(input_ids=tokens, labels=[token % 3 for token in tokens])


def padded(found: list[Any]) -> UserDict[str, Tensor]:
    """As long as the longest of them."""
    width = max(len(one["labels"]) for one in found)

    def column(name: str, filler: int) -> Tensor:
        return torch.tensor([one[name] + [filler] * (width - len(one[name])) for one in found])

    return UserDict(input_ids=column("input_ids", 0), labels=column("labels", -100))


def tokens(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Sentences of unequal length, padded to the longest of each data shard."""
    strategy = make_strategy(name or None, **options)
    net = Tagger()
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.SGD(net.parameters(), 0.5),
        metrics="accuracy",
        strategy=strategy,
    )
    loader = torch.utils.data.DataLoader(Sentences(), 4, collate_fn=padded)
    history = trainer.fit(loader, epochs=2, validation_data=loader, verbose=0)
    result = {"history": history.history, "weights": weights(strategy, net)}
    strategy.close()
    return result


def one_after_the_other(name: str, options: dict[str, Any]) -> list[int]:
    """Steps of three trainings, each with a strategy of its own; all are still referred to."""
    trainers = []
    for _ in range(3):
        strategy, net = make_strategy(name, **options), mlp()
        optimizer = torch.optim.Adam(net.parameters(), 0.02)
        trainer = sp.Trainer(
            net, optimizer=optimizer, loss=nn.CrossEntropyLoss(), strategy=strategy
        )
        trainer.fit(blobs(20), batch_size=10, verbose=0)
        strategy.close()
        trainers.append(trainer)
    return [trainer.step for trainer in trainers]


def folds(name: str, options: dict[str, Any], closes: bool) -> list[tuple[bool, bool, int]]:
    """After each of three trainings: whether strategy and model are gone, and what is mapped."""
    found = []
    for _ in range(3):
        strategy = make_strategy(name, **options)
        net = mlp()
        trainer = sp.Trainer(
            net,
            optimizer=torch.optim.Adam(net.parameters(), 0.02),
            loss=nn.CrossEntropyLoss(),
            strategy=strategy,
        )
        trainer.fit(blobs(20), batch_size=10, verbose=0)
        alive = weakref.ref(strategy), weakref.ref(net)
        strategy.coordination.tell_all("")
        if closes:
            strategy.close()
        del strategy, net, trainer
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("spartito-")
        found.append((alive[0]() is None, alive[1]() is None, maps))
    return found
