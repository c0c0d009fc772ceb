"""What the tests of local_sgd run on every replica, and the same by plain torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import spartito as sp
from tests.replicas import warns
from tests.strategies.jobs import blobs, make_strategy, mlp, weights

EXAMPLES, BATCH, EPOCHS = 46, 8, 3  # the last batch of an epoch has six examples
OUTER: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "average": lambda p: torch.optim.SGD(p, 1.0),
    "diloco": lambda p: torch.optim.SGD(p, 0.7, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
}
INNER: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.02),
}


@warns("every=")
def trained(
    name: str,
    options: dict[str, Any],
    inner: str = "adamw",
    epochs: int = EPOCHS,
    batch: int = BATCH,
    examples: int = EXAMPLES,
    **more: Any,
) -> dict[str, Any]:
    """History and weights of a network trained in the order of the data."""
    if options.get("outer") == "adam":
        options = {**options, "outer": OUTER["adam"]}
    strategy = make_strategy(name, **options)
    net = mlp()
    trainer = sp.Trainer(
        net,
        optimizer=INNER[inner],
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        strategy=strategy,
        **more,
    )
    x, y = blobs(examples)
    history = trainer.fit(
        sp.data.arrays(x, y).batch(batch), epochs=epochs, validation_data=(x, y), verbose=0
    )
    found = {"history": history.history, "weights": weights(strategy, net)}
    if "mesh" not in str(strategy) and "pipeline" not in str(strategy):
        found["here"] = {name: value.clone() for name, value in net.state_dict().items()}
    strategy.close()
    return found


def looked_at(
    name: str, options: dict[str, Any], at: Sequence[int], folder: str = ""
) -> dict[str, Any]:
    """A training that is evaluated, and saved in ``folder``, after some of its steps."""
    strategy = make_strategy(name, **options)
    net = mlp()
    x, y = blobs(EXAMPLES)
    seen: list[float] = []

    class Look(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if trainer.step in at:
                seen.append(trainer.evaluate((x, y))["loss"])
                trainer.save(f"{folder}/{trainer.step}")

    trainer = sp.Trainer(
        net, optimizer=INNER["adamw"], loss=nn.CrossEntropyLoss(), strategy=strategy
    )
    data = sp.data.arrays(x, y).batch(BATCH)
    history = trainer.fit(data, epochs=1, callbacks=[Look()], verbose=0)
    found = {"history": history.history, "weights": weights(strategy, net), "seen": seen}
    strategy.close()
    return found


def glanced(name: str, options: dict[str, Any], looks: bool) -> dict[str, Any]:
    """A training with BatchNorm whose chief looks at the merged model after each of its steps."""
    strategy = make_strategy(name, **options)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()

    class Look(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if looks:
                strategy.coordination.synchronize()

    trainer = sp.Trainer(
        net, optimizer=INNER["adamw"], loss=nn.CrossEntropyLoss(), strategy=strategy
    )
    x, y = blobs(EXAMPLES)
    trainer.fit(sp.data.arrays(x[:, :4], y).batch(BATCH), epochs=2, callbacks=[Look()], verbose=0)
    found = weights(strategy, net)
    strategy.close()
    return found


def written_amid(name: str, options: dict[str, Any], how: str) -> dict[str, Any] | str:
    """A training in which somebody writes into the merged model that was shown.

    ``how``: to stay ("in place", "set", on the "chief" alone), or puts it "back", in callbacks; or
    "in a loop" of one's own.
    """
    strategy = make_strategy(name, **options)
    net = mlp()

    @torch.no_grad()
    def write() -> None:
        _, bias, *_, last = net.parameters()
        before = bias.clone(), last.clone()
        if how == "set":
            last.data = torch.ones_like(last)
        elif how != "chief" or strategy.is_chief:
            last.neg_()
            bias.data.mul_(0.5)
        if how == "back":
            bias.copy_(before[0])
            last.copy_(before[1])

    class Write(sp.Callback):
        batches = 0

        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            self.batches += 1
            if self.batches == 2:
                strategy.coordination.synchronize()
                write()

    data = sp.data.arrays(*blobs(EXAMPLES)).batch(BATCH)
    try:
        # A worker that comes late finds that the chief has ended the job.
        trainer = sp.Trainer(
            net, optimizer=INNER["adamw"], loss=nn.CrossEntropyLoss(), strategy=strategy
        )
        if how != "in a loop":
            trainer.fit(data, epochs=1, callbacks=[Write()], verbose=0)
            return weights(strategy, net)
        for number, batch in enumerate(strategy.distribute(data), 1):
            losses = nn.functional.cross_entropy(net(batch.x), batch.y, reduction="none")
            strategy.backward(losses, batch)
            strategy.update(trainer.optimizer)
            if number == 2:
                strategy.synchronize()
                write()
        return weights(strategy, net)
    except (sp.UserError, sp.TaskLostError) as error:
        return str(error)
    finally:
        strategy.close()


def written_beside_servers(name: str, options: dict[str, Any], how: str) -> str:
    """What is said where a script writes what parameter servers replace.

    ``how``: "before" the first step, "between" two fits, in a "loop" of one's own, by a "pre_hook"
    or "post_hook" of the optimizer, or a callback has "frozen" a weight. One that is "frozen
    between" two fits is so on all tasks, and so is one that is "unfrozen between" them. A callback
    has "unfrozen" a bias, or writes into a "buffer", or into what is "still", and a loop "waits"
    with its updates. It "begins" or "loads" the optimizer's state anew, or "saves" it. A "forward"
    pass writes, also by ".data", as one that clamps what it learns.
    """
    strategy = make_strategy(name, **options)
    net: Any = mlp()
    if "forward" in how:
        net[0].register_forward_pre_hook(partial(_shorten, by_data=how == "forward .data"))
    net[0].bias.requires_grad_(how != "still" and not how.startswith("unfrozen"))
    if how == "buffer":
        net.register_buffer("steps", torch.zeros(1))

    class Freeze(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if how == "frozen":
                net[0].weight.requires_grad_(False)
            if how == "still":
                net[0].bias.data.add_(1.0)
            if how == "unfrozen":
                net[0].bias.requires_grad_(True)
            if how == "buffer":
                net.steps += 1

    data = sp.data.arrays(*blobs(EXAMPLES)).batch(BATCH)
    try:
        trainer = sp.Trainer(
            net, optimizer=INNER["adamw"], loss=nn.CrossEntropyLoss(), strategy=strategy
        )
        if how == "before":
            net[0].bias.data.add_(1.0)
        if how.endswith("_hook"):
            register = getattr(trainer.optimizer, f"register_step_{how}")
            register(lambda *_: net[0].bias.data.zero_())
        if how not in ("loop", "waits", "begins", "loads", "saves"):
            changes = ("frozen", "still", "unfrozen", "buffer")
            given = [Freeze()] if how in changes else []
            trainer.fit(data, epochs=1, callbacks=given, verbose=0)
            if how == "between":
                net[0].bias.data.add_(1.0)
            if how == "frozen between":
                net[0].weight.requires_grad_(False)
            if how == "unfrozen between":
                net[0].bias.requires_grad_(True)
            trainer.fit(data, epochs=1, callbacks=given, verbose=0)
            return "it trains"
        for number, batch in enumerate(strategy.distribute(data)):
            losses = nn.functional.cross_entropy(net(batch.x), batch.y, reduction="none")
            strategy.backward(losses, batch)
            if how != "waits" or number % 2:
                strategy.update(trainer.optimizer)
            if how == "begins":
                trainer.optimizer.state.clear()
            if how == "loads":
                trainer.optimizer.load_state_dict({"state": {}, "param_groups": []})
            if how == "saves":
                trainer.optimizer.state_dict()
            if how == "loop":
                net[3].bias.data.clamp_(-0.01, 0.01)
        return "it trains"
    except (sp.UserError, sp.TaskLostError) as error:
        return str(error)
    finally:
        strategy.close()


def rate_of(epoch: int) -> float:
    return 0.2 / (1 + epoch)


def rate_set(name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """What is learned where a callback of a user's own sets the rate of each epoch."""
    strategy = make_strategy(name, **options)
    net = mlp()

    class Rate(sp.Callback):
        def on_epoch_begin(self, epoch: int) -> None:
            self.trainer.optimizer.param_groups[0]["lr"] = rate_of(epoch)

    try:
        trainer = sp.Trainer(
            net,
            optimizer=torch.optim.SGD(net.parameters(), 1.0),
            loss=nn.CrossEntropyLoss(),
            strategy=strategy,
        )
        data = sp.data.arrays(*blobs(EXAMPLES)).batch(BATCH)
        trainer.fit(data, epochs=3, callbacks=[Rate()], verbose=0)
        return weights(strategy, net)
    finally:
        strategy.close()


def rate_set_by_torch() -> dict[str, Tensor]:
    """The same on one device; groups that meet after each update of SGD are no different."""
    net = mlp()
    x, y = blobs(EXAMPLES)
    for epoch in range(3):
        optimizer = torch.optim.SGD(net.parameters(), rate_of(epoch))
        for at in range(0, EXAMPLES, BATCH):
            optimizer.zero_grad()
            rows = slice(at, at + BATCH)
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    return net.state_dict()


def _shorten(layer: Any, _: Any, by_data: bool) -> None:
    if by_data:
        layer.bias.data.clamp_(-0.01, 0.01)
    else:
        torch.embedding_renorm_(layer.weight.detach(), torch.tensor([1, 3]), 0.01, 2.0)


def halved(name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of a training in which a callback writes after the last batch of each epoch."""
    strategy = make_strategy(name, **options)
    net = mlp()

    class Halve(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if trainer.step % -(-EXAMPLES // BATCH) == 0:
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter.mul_(0.5)

    trainer = sp.Trainer(
        net, optimizer=INNER["adamw"], loss=nn.CrossEntropyLoss(), strategy=strategy
    )
    data = sp.data.arrays(*blobs(EXAMPLES)).batch(BATCH)
    trainer.fit(data, epochs=2, callbacks=[Halve()], verbose=0)
    found = weights(strategy, net)
    strategy.close()
    return found


@warns("the checkpoint is of ")
def loaded(name: str, options: dict[str, Any], path: str) -> dict[str, Any]:
    """The model of a checkpoint, and whether training goes on from it."""
    strategy = make_strategy(name, **options)
    net = mlp()
    trainer = sp.Trainer(
        net, optimizer=INNER["adamw"], loss=nn.CrossEntropyLoss(), strategy=strategy
    )
    trainer.load(path)
    before = weights(strategy, net)
    trainer.fit(sp.data.arrays(*blobs(EXAMPLES)).batch(BATCH), epochs=1, verbose=0)
    found = {"before": before, "steps": trainer.step}
    strategy.close()
    return found


def clipped(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """As `trained`, of all that looks at a whole update: norms, accumulation, weights."""
    strategy = make_strategy(name, **options)
    net = mlp(0.3)
    trainer = sp.Trainer(
        net,
        optimizer=INNER["adamw"],
        loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]).double()),
        strategy=strategy,
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.7),
        accumulate=2,
        clip_norm=0.1,
        deterministic=True,
    )
    x, y = blobs(EXAMPLES)
    data = sp.data.arrays(x, y).shuffle().batch(BATCH)
    history = trainer.fit(data, epochs=2, validation_data=(x, y), verbose=0)
    found = {"history": history.history, "weights": weights(strategy, net)}
    strategy.close()
    return found


def halves(parameters: Iterable[nn.Parameter]) -> Optimizer:
    first, *rest = parameters
    return torch.optim.Rprop([{"params": [first]}, {"params": rest}])


def refusal(name: str, options: dict[str, Any], kind: str = "") -> str:
    """What is said to a training that cannot be."""
    outers = {"outer": lambda p: torch.optim.LBFGS(p), "halves": halves}
    given = {"outer": outers[kind]} if kind in outers else {}
    try:
        strategy = make_strategy(name, **options, **given)
    except sp.UserError as error:
        return str(error)
    net = mlp()
    if kind == "model" and strategy.cluster.rank == 1:
        net = nn.Linear(2, 2)
    try:
        sp.Trainer(net, optimizer=INNER["sgd"], strategy=strategy)
        return ""
    except sp.UserError as error:
        return str(error)
    finally:
        strategy.close()


def killed(name: str, options: dict[str, Any], rank: int) -> str:
    """A training in which one replica ends without a word: what the others say."""
    strategy = make_strategy(name, **options)

    class End(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if strategy.cluster.rank == rank and trainer.step == 4:
                os._exit(3)

    trainer = sp.Trainer(
        mlp(), optimizer=INNER["sgd"], loss=nn.CrossEntropyLoss(), strategy=strategy
    )
    try:
        trainer.fit(blobs(96), epochs=2, batch_size=8, callbacks=[End()], verbose=0)
    except sp.TaskLostError as error:
        return str(error)
    finally:
        strategy.close()
    return ""


def held(name: str, options: dict[str, Any]) -> dict[str, int]:
    """How many elements of each kind this task has after an update and a meeting."""
    strategy = make_strategy(name, **options)
    net = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).double()
    _, optimizer = strategy.prepare(net, torch.optim.Adam(net.parameters()))
    for batch in strategy.distribute(sp.data.arrays(*blobs(8)).batch(8)):
        strategy.step(batch, nn.CrossEntropyLoss())
    coupling = strategy.engine.team.outer._couplings[id(optimizer)]._parts[0]  # type: ignore[attr-defined]
    outer = coupling._outer.state.values()
    found = {
        "model": sum(parameter.numel() for parameter in net.parameters()),
        "state": sum(values["exp_avg"].numel() for values in optimizer.state.values()),
        "start": coupling._start.numel(),
        "outer": sum(values["momentum_buffer"].numel() for values in outer),
        "own": sum(home.own.numel() for home in set(strategy.engine.parts.exchange.homes.values())),  # type: ignore[attr-defined]
    }
    strategy.close()
    return found


class Few(nn.Module):
    """Four parameters, one of them a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x[:, :3] * self.scale + self.shift
        return out


def few(name: str, options: dict[str, Any], folder: str) -> dict[str, Tensor]:
    """The weights of a small model that was saved and loaded on its way."""
    strategy = make_strategy(name, **options)
    net = Few().double()
    trainer = sp.Trainer(
        net, optimizer=INNER["adamw"], loss=nn.CrossEntropyLoss(), strategy=strategy
    )
    trainer.fit(blobs(32), batch_size=8, epochs=2, verbose=0)
    trainer.save(folder)
    trainer.load(folder)
    trainer.fit(blobs(32), batch_size=8, epochs=3, verbose=0)
    found = weights(strategy, net)
    strategy.close()
    return found
