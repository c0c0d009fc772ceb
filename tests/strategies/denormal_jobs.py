"""What threads make of denormal numbers while they train; bits tell, as comparisons flush too."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

import spartito as sp
from spartito.strategies import strategy as make_strategy

SMALLEST = 0x00800000
"""The bits of the smallest fp32 number that is not denormal, 2**-126."""
HALF = 0x00400000
"""Those of half of it, which is denormal."""


def smallest(count: int = 1) -> Tensor:
    return torch.full((count,), SMALLEST, dtype=torch.int32).view(torch.float32)


def halved(count: int = 1) -> list[int]:
    """The bits of half of the smallest number: 0 where denormals are flushed, else `HALF`."""
    return (smallest(count) * 0.5).view(torch.int32).tolist()


def flushes() -> bool:
    return halved() == [0]


class Watched(nn.Module):
    """One weight, 1.5 * 2**-126, whose gradient is its input; says what forward and backward do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(smallest() * 1.5)
        self.seen: dict[str, list[bool]] = {"forward": [], "backward": [], "evaluation": []}
        self.weight.register_hook(self._look)

    def _look(self, grad: Tensor) -> None:
        self.seen["backward"].append(flushes())

    def forward(self, x: Tensor) -> Tensor:
        self.seen["forward" if self.training else "evaluation"].append(flushes())
        return (self.weight * x).sum(1)

    @property
    def bits(self) -> int:
        return int(self.weight.detach().view(torch.int32).item())


def itself(output: Tensor, target: Tensor) -> Tensor:
    return output


def data(rows: int) -> sp.data.Dataset:
    """``rows`` inputs as one batch, 2**-126 in the mean: one update makes the weight denormal."""
    x = torch.zeros(rows, 1)
    x[0] = smallest() * rows
    return sp.data.arrays(x, torch.zeros(rows)).batch(rows)


class Nested(sp.Callback):
    """Evaluates inside of an epoch's end, and looks before and after."""

    def __init__(self, seen: dict[str, list[bool]]) -> None:
        self.seen = seen

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        before = flushes()
        cast(sp.Trainer, self.trainer).evaluate(data(2))
        self.seen["callback"] = [before, flushes()]


def fits(name: str, rows: int, flush: bool) -> dict[str, Any]:
    """What all parts of `fit`, `evaluate` and `predict` saw, and the thread after each."""
    gc.collect()
    strategy = make_strategy(name, flush_denormals=flush)
    model = Watched()
    seen, after = model.seen, {"start": flushes()}
    trainer = sp.Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=1), loss=itself, strategy=strategy
    )
    after["prepare"] = flushes()

    def read(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        seen.setdefault("reading", []).append(flushes())
        return x, y

    callbacks = [Nested(seen)] if name != "parameter_server" else []
    trainer.fit(data(rows).map(read), verbose=False, callbacks=callbacks)
    after["fit"] = flushes()
    bits = model.bits
    trainer.evaluate(data(rows))
    after["evaluate"] = flushes()
    trainer.predict(data(rows))
    after["predict"] = flushes()
    strategy.close()
    return {"seen": {what: set(found) for what, found in seen.items()}, "after": after,
            "bits": bits}  # fmt: skip


def loops(name: str, rows: int, flush: bool) -> dict[str, Any]:
    """The same of a loop of one's own: through the data, left early, and on one kept batch."""
    found: dict[str, Any] = {}
    with make_strategy(name, flush_denormals=flush) as strategy:
        model = Watched()
        _, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=1))
        for batch in strategy.distribute(data(rows)):
            strategy.backward(model(batch.x), batch)
            strategy.update(optimizer)
            found["bits"] = model.bits
        found["after"] = flushes()
        first = next(iter(strategy.distribute(data(rows))))
        found["dropped"] = flushes()
        with torch.no_grad():
            model.weight.copy_(smallest() * 1.5)
        strategy.backward(model(first.x), first)
        strategy.update(optimizer)
        found["one batch"] = model.bits
        batches = iter(strategy.distribute(data(rows).repeat()))
        next(batches)
        found["left"] = flushes()
    found["closed"] = flushes()
    del batches
    gc.collect()
    found["collected"] = flushes()
    return found


def fails() -> list[bool]:
    """The thread after errors in `fit`, `evaluate` and `predict`, which are still held.

    And after Control-C in the middle of an epoch.
    """

    def broken(*_: Any) -> Any:
        if where == "interrupt":
            signal.raise_signal(signal.SIGINT)
        else:
            raise ZeroDivisionError

    found, held = [], []
    for where in ("loss", "callback", "interrupt", "evaluate", "predict"):
        with sp.OneDeviceStrategy() as strategy:
            model = Watched()
            trainer = sp.Trainer(
                model,
                optimizer=torch.optim.SGD(model.parameters(), lr=1),
                loss=broken if where in ("loss", "evaluate") else itself,
                strategy=strategy,
            )
            callback = sp.Callback()
            if where in ("callback", "interrupt"):
                callback.on_train_batch_end = broken  # type: ignore[method-assign, assignment]
            if where == "predict":
                model.register_forward_hook(broken)
            calls = {"evaluate": trainer.evaluate, "predict": trainer.predict}
            call: Callable[..., Any] = calls.get(where, trainer.fit)
            try:
                call(data(2), callbacks=[callback])
            except (ZeroDivisionError, KeyboardInterrupt) as error:
                held.append(error)
            found.append(flushes())
    return [*found, len(held) == 5]


def keeps_what_was_set() -> bool:
    """A thread that flushes already does so after training, too."""
    torch.set_flush_denormal(True)
    try:
        fits("one_device", 2, True)
        return flushes()
    finally:
        torch.set_flush_denormal(False)


def in_the_pool(count: int, threads: int) -> dict[str, list[int]]:
    """The different bits of one operation that is divided among threads that were there before."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    found = {}

    def look(output: Tensor, target: Tensor) -> Tensor:
        found["training"] = sorted(set(halved(count)))
        return output

    try:
        found["before"] = sorted(set(halved(count)))
        with sp.OneDeviceStrategy() as strategy:
            model = Watched()
            optimizer = torch.optim.SGD(model.parameters(), lr=1)
            trainer = sp.Trainer(model, optimizer=optimizer, loss=look, strategy=strategy)
            trainer.fit(data(2), verbose=False)
        found["after"] = sorted(set(halved(count)))
    finally:
        torch.set_num_threads(before)
    return found
