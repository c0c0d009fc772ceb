"""One side of a race: trains, and prints the seconds per step of every window.

fit      Spartito's Trainer.fit          ddp    torch's DistributedDataParallel on gloo
loop     Spartito's custom loop          alone  processes that do not communicate
central  `fit` under central_storage
bare     a divided update, hand-written
sockets  `fit` by sockets over the loopback; bare_sockets: with nothing authenticated
same     ddp of the model that Spartito trains; written: ddp of torch's default layout
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle

import torch
import torch.distributed as dist
from torch import nn

import spartito as sp
from benchmarks.common import flush_denormals
from benchmarks.jobs.bare import stepper as bare_step
from benchmarks.jobs.plain import Work, in_default_layout, make_work
from benchmarks.race import OURS
from spartito.wire import handshake

BY_SOCKETS = ("sockets", "bare_sockets")


@dataclass(frozen=True)
class Plan:
    """How many windows of how many steps are timed, after one that warms up."""

    windows: int
    steps: int
    precision: str


def main() -> None:
    """Run the side that the command line names; rank 0 prints."""
    options = argparse.ArgumentParser()
    options.add_argument("side", choices=SIDES)
    options.add_argument("model", choices=("mlp", "wide", "xception"))
    options.add_argument("--windows", type=int, required=True)
    options.add_argument("--steps", type=int, required=True)
    options.add_argument("--precision", default="fp32")
    given = options.parse_args()
    torch.set_num_threads(1)
    flush_denormals()
    work = make_work(given.model, int(os.environ["WORLD_SIZE"]))
    if given.model == "xception" and given.side in (*OURS, *BY_SOCKETS, "same", "alone"):
        work = replace(work, model=sp.models.CatsVsDogs())
    elif given.side == "written":
        work = in_default_layout(work)
    found = SIDES[given.side](work, Plan(given.windows, given.steps, given.precision))
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)


class EpochClock(sp.Callback):
    """Seconds per step of every epoch; the epochs are the windows."""

    def __init__(self, steps: int) -> None:
        self.windows: list[float] = []
        self._steps = steps
        self._began = 0.0

    def on_epoch_begin(self, epoch: int) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: object) -> None:
        self.windows.append((time.perf_counter() - self._began) / self._steps)


def fit(work: Work, plan: Plan, strategy: sp.Strategy | None = None) -> list[float]:
    """`Trainer.fit` over virtual epochs."""
    strategy = strategy or sp.MirroredStrategy()
    trainer = sp.Trainer(
        work.model,
        optimizer=adam(work.model),
        loss=work.loss,
        strategy=strategy,
        precision=plan.precision,
    )
    clock = EpochClock(plan.steps)
    trainer.fit(
        sp.data.arrays(work.x, work.y).batch(work.local_batch * strategy.num_replicas_in_sync),
        epochs=plan.windows + 1,
        steps_per_epoch=plan.steps,
        callbacks=[clock],
        verbose=False,
    )
    strategy.close()
    return clock.windows[1:]


def central(work: Work, plan: Plan) -> list[float]:
    """The same under central_storage."""
    return fit(work, plan, sp.CentralStorageStrategy())


def sockets(work: Work, plan: Plan) -> list[float]:
    """The same by sockets."""
    return fit(work, plan, sp.MirroredStrategy(communication="sockets"))


def bare_sockets(work: Work, plan: Plan) -> list[float]:
    """The same by sockets on which nothing is authenticated after the handshake."""

    def bare(connection: socket.socket, *_: object) -> socket.socket:
        connection.settimeout(None)
        return connection

    handshake._sealed = bare  # type: ignore[assignment]
    return sockets(work, plan)


def loop(work: Work, plan: Plan) -> list[float]:
    """A loop of the user's own on Spartito's strategy."""
    strategy = sp.MirroredStrategy()
    model, optimizer = strategy.prepare(work.model, adam(work.model), precision=plan.precision)
    assert optimizer is not None
    data = sp.data.arrays(work.x, work.y).batch(work.local_batch * strategy.num_replicas_in_sync)
    batches = iter(strategy.distribute(data.repeat()))

    def step() -> None:
        batch = next(batches)
        with autocast(plan.precision):
            loss = work.loss(model(batch.x), batch.y)
        strategy.backward(loss, batch)
        strategy.update(optimizer)

    found = time_windows(step, plan, meet=lambda: None)
    strategy.close()
    return found


def ddp(work: Work, plan: Plan) -> list[float]:
    """Plain torch with DistributedDataParallel, on batches that are ready."""
    dist.init_process_group("gloo")
    found = time_plain(nn.parallel.DistributedDataParallel(work.model), work, plan)
    dist.destroy_process_group()
    return found


def alone(work: Work, plan: Plan) -> list[float]:
    """Plain torch, every process for itself; they meet between the windows to run side by side."""
    dist.init_process_group("gloo")
    found = time_plain(work.model, work, plan)
    dist.destroy_process_group()
    return found


def bare(work: Work, plan: Plan) -> list[float]:
    """The least that a divided update costs, without a library around it."""
    dist.init_process_group("gloo")
    found = time_windows(bare_step(work, dist.get_rank()), plan, meet=dist.barrier)
    dist.destroy_process_group()
    return found


def time_plain(model: nn.Module, work: Work, plan: Plan) -> list[float]:
    """The bare loop that both plain sides run."""
    optimizer = adam(model)
    batches = cycle(work.ready(dist.get_rank(), dist.get_world_size()))

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with autocast(plan.precision):
            loss = work.loss(model(x), y)
        loss.backward()
        optimizer.step()

    return time_windows(step, plan, meet=dist.barrier)


def time_windows(step: Callable[[], None], plan: Plan, meet: Callable[[], object]) -> list[float]:
    """Seconds per step of every window but the first; all processes ``meet`` before each."""
    found = []
    for _ in range(plan.windows + 1):
        meet()
        began = time.perf_counter()
        for _ in range(plan.steps):
            step()
        found.append((time.perf_counter() - began) / plan.steps)
    return found[1:]


def adam(model: nn.Module) -> torch.optim.Adam:
    """The optimizer of all sides."""
    return torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)


def autocast(precision: str) -> torch.autocast:
    """bf16 where it is asked for."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


SIDES: dict[str, Callable[[Work, Plan], list[float]]] = {
    "fit": fit,
    "loop": loop,
    "central": central,
    "ddp": ddp,
    "same": ddp,
    "written": ddp,
    "alone": alone,
    "bare": bare,
    "sockets": sockets,
    "bare_sockets": bare_sockets,
}

if __name__ == "__main__":
    main()
