"""One task of `benchmarks.parameter_server --parts`: the CPU time of each part of a push.

Parts of the code are wrapped from outside; the time of a part leaves out the parts inside it.
Every task writes ``NAME.parts`` into the folder BENCHMARK_FOLDER: microseconds per push.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch

import spartito as sp
from benchmarks.jobs.asynchronous import meet
from benchmarks.jobs.plain import Work, make_work
from benchmarks.jobs.steps import adam
from spartito.data.batch import Batch
from spartito.engine.updates import fused_update
from spartito.ps.client.link import Link
from spartito.ps.client.servers import Servers
from spartito.ps.server.connection import Connection
from spartito.ps.server.store import Store
from spartito.steps.servers import lease_readers
from spartito.steps.servers.push import Pusher
from spartito.steps.step import Step
from spartito.training.loops.training_loop import TrainingLoop
from spartito.wire.frames import Wire

WARM = 300
"""Pushes before anything is counted."""


class Parts:
    """CPU time of the parts of this process's threads, per push."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.Lock()
        self._began = 0.0
        self.spent: defaultdict[str, int] = defaultdict(int)
        self.pushes = 0

    def wrap(self, owner: Any, name: str, part: str, counts: bool = False) -> None:
        """Have ``owner.name`` count as ``part``; one call is one push where it ``counts``."""
        setattr(owner, name, self.timed(getattr(owner, name), part, counts))

    def timed(
        self, function: Callable[..., Any], part: str, counts: bool = False
    ) -> Callable[..., Any]:
        """``function`` that counts as ``part``."""

        @functools.wraps(function)
        def found(*given: Any, **named: Any) -> Any:
            stack = self._stack()
            self._turn(stack, part)
            try:
                return function(*given, **named)
            finally:
                self._turn(stack, None)
                if counts:
                    self._count()

        return found

    def figures(self) -> dict[str, float]:
        """Microseconds per push of each part, and of the threads that none of them is in."""
        whole = time.process_time() - self._began
        found = {part: spent / 1e3 / self.pushes for part, spent in self.spent.items()}
        found["other threads"] = whole * 1e6 / self.pushes - sum(found.values())
        return {**found, "pushes": self.pushes}

    def _stack(self) -> list[Any]:
        if not hasattr(self._local, "stack"):
            self._local.stack, self._local.last = [], 0
        found: list[Any] = self._local.stack
        return found

    def _turn(self, stack: list[Any], part: str | None) -> None:
        now = time.thread_time_ns()
        if stack:
            self.spent[stack[-1]] += now - self._local.last
        self._local.last = now
        stack.append(part) if part is not None else stack.pop()

    def _count(self) -> None:
        self.pushes += 1
        if self._began == 0.0 and self.pushes == WARM:
            self.pushes, self._began = 0, time.process_time()
            self.spent.clear()


def worker_parts() -> Parts:
    """The parts of a worker."""
    parts = Parts()
    parts.wrap(TrainingLoop, "_train_epoch", "fit: metrics, logs, callbacks, counts")
    parts.wrap(Step, "_compute", "forward, loss, backward")
    parts.wrap(Servers, "fill", "pack the gradients, their norm")
    parts.wrap(Servers, "result", "reply: wait, read")
    parts.wrap(Link, "fill_model", "copy the values into the model")
    parts.wrap(Pusher, "_send", "request: build, send", counts=True)
    read: Callable[..., Generator[Batch]] = lease_readers.IndexedReader.read

    def reading(reader: Any, lease: Any) -> Generator[Batch]:
        batches = read(reader, lease)
        following = parts.timed(lambda: next(batches, None), "read the batch")
        while (batch := following()) is not None:
            yield batch

    setattr(lease_readers.IndexedReader, "read", reading)  # noqa: B010 - a method is replaced
    return parts


def server_parts() -> Parts:
    """The parts of a server."""
    parts = Parts()
    parts.wrap(Connection, "_serve", "serve: locks, checks, staleness")
    parts.wrap(Wire, "receive", "request: wake up, read")
    parts.wrap(Connection, "_check_push", "serve: locks, checks, staleness")
    parts.wrap(Store, "push", "count, and prepare the update")
    for kind in (fused_update.Stepper, fused_update.Prepared):
        parts.wrap(kind, "step", "the optimizer's kernel")
    parts.wrap(Connection, "_bring", "copy the values")
    parts.wrap(Connection, "_reply", "reply: send", counts=True)
    return parts


def plain(work: Work, steps: int) -> dict[str, float]:
    """The same steps in plain torch, with torch's own `Optimizer.step`."""
    optimizer, batches = adam(work.model), work.ready(0, 2)
    parts = Parts()

    def backward(x: torch.Tensor, y: torch.Tensor) -> None:
        work.loss(work.model(x), y).backward()

    compute = parts.timed(backward, "forward, loss, backward")
    step = parts.timed(optimizer.step, "Optimizer.step", counts=True)
    for number in range(steps + WARM):
        compute(*batches[number % len(batches)])
        step()
        optimizer.zero_grad(set_to_none=True)
    return parts.figures()


def main() -> None:
    """Train by `fit`, or plainly, and write where the time went."""
    options = argparse.ArgumentParser()
    options.add_argument("--workers", type=int, required=True)
    options.add_argument("--steps", type=int, required=True)
    options.add_argument("--plain", action="store_true")
    given = options.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    folder = Path(os.environ["BENCHMARK_FOLDER"])
    work = make_work("mlp", 2)
    if given.plain:
        print(json.dumps(plain(work, given.steps)), flush=True)
        return
    strategy = sp.strategy()
    name = str(strategy.task)
    parts = server_parts() if strategy.task.type == "ps" else worker_parts()
    atexit.register(lambda: (folder / f"{name}.parts").write_text(json.dumps(parts.figures())))
    trainer = sp.Trainer(
        work.model, optimizer=adam(work.model), loss=work.loss, strategy=strategy
    )  # a ps serves here, and goes no further
    meet(folder, name, given.workers)
    trainer.fit(
        sp.data.arrays(work.x, work.y).batch(work.local_batch * given.workers),
        steps_per_epoch=given.steps,
        verbose=False,
    )
    strategy.close()
    print(json.dumps({}), flush=True)


if __name__ == "__main__":
    main()
