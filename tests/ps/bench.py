"""A store on a bench, and workers as threads, for the tests of its rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from spartito.ps.client.vector import SpanCopies, Vector
from spartito.ps.protocol.layout import Span
from spartito.ps.protocol.messages import Outcome, Push
from spartito.ps.protocol.rules import Rules
from spartito.ps.server.shard import Shard
from spartito.ps.server.store import Store

T = TypeVar("T")

LIMIT = 60.0  # seconds that no passing test comes near
SIZE = 8
ZEROS = torch.zeros(SIZE, dtype=torch.float64)


class Bench:
    """A store with one parameter of eight doubles, all zero, and a buffer that counts."""

    def __init__(
        self, rules: Rules, *, gates: bool = True, kind: type[Optimizer] = SGD, **options: Any
    ) -> None:
        model = nn.Module()
        self.weight = nn.Parameter(ZEROS.clone())
        self.other = nn.Parameter(ZEROS.clone())
        model.weight, model.other = self.weight, self.other
        model.register_buffer("count", torch.tensor(0))
        make: Any = kind
        optimizer = make([self.weight, self.other], **({"lr": 1.0} | options))
        vector = Vector(model, optimizer)
        span = Span(0, vector.layout.size)
        shard = Shard(vector.layout, span, optimizer, vector.tensors)
        self.store = Store(shard, rules, gates=gates, log=None)
        self.store.ready = True
        self._copies = SpanCopies(vector, span, shard.values)
        self._model = model

    def push(
        self, worker: int, push: Push, *numbers: float, pulled: torch.Tensor | None = None
    ) -> Outcome:
        """The gradient of the first parameter is ``numbers``; the other has none."""
        gradient = torch.zeros_like(self.store.shard.values)
        gradient[: 8 * SIZE].view(torch.float64)[: len(numbers)] = torch.tensor(
            numbers, dtype=torch.float64
        )
        gradient[-64:-56].view(torch.int64)[0] = 1
        with self.store.lock:
            return self.store.push(worker, push, gradient, pulled)[0]

    def values(self) -> list[float]:
        """The first parameter, as far as it is not zero."""
        self._copies.load()
        assert not self.other.any()
        found = [float(number) for number in self.weight.detach()]
        while found and found[-1] == 0:
            found.pop()
        return found

    @property
    def count(self) -> int:
        """What the buffer counted."""
        self._copies.load()
        return int(self._model.count)  # type: ignore[arg-type]

    def numbers(self) -> tuple[int, int, int, int]:
        """Updates, pushes, work items, examples."""
        store = self.store
        return store.version, store.pushes, store.work_items, store.examples


def push(step: int, part: int = 0, /, **facts: Any) -> Push:
    given: dict[str, Any] = {
        "keys": [(1, 0, step, part)], "pulled": 0, "weight": 1.0, "examples": 4,
        "absent": [1],
    }  # fmt: skip
    return Push(**(given | facts))


@contextmanager
def threads(count: int = 8) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(count) as pool:
        yield pool


def results(futures: Sequence[Future[T]]) -> list[T]:
    return [future.result(LIMIT) for future in futures]


def round_of(worker: int, step: int = 0, group: int = 1, **facts: Any) -> Push:
    return push(step, worker, group=group, index=step, parties=2, **facts)


def waits_in(bench: Bench, worker: int) -> bool:
    """Whether the push of this worker is in a round that waits for others."""
    return any(worker in mean.workers for mean in bench.store._rounds.values())


def wait_until(bench: Bench, true: Callable[[], bool]) -> None:
    """Until a thread of the test has come as far as this; a limit instead of a hang."""
    with bench.store.lock:
        for _ in range(int(LIMIT * 100)):
            if true():
                return
            bench.store.lock.wait(0.01)
    raise AssertionError("it did not come to this in time")
