"""Which batch size to train with: short trials in which it doubles."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from spartito.accelerators import device_memory
from spartito.data.dataset import Dataset, as_dataset
from spartito.errors import UserError
from spartito.names import size as in_bytes
from spartito.notes import note
from spartito.system import host_key, peak_memory, resident_memory
from spartito.system.capacity import available_memory
from spartito.training.trials.trial_steps import check_meets, undone, update, without_end

if TYPE_CHECKING:
    from spartito.training.trainer import Trainer

PATIENCE = 2
"""How many sizes in a row that are not quicker end the search."""
ROWS = 2
"""Examples of each replica with which it begins: BatchNorm takes no single one."""


@dataclass(frozen=True)
class BatchSizes:
    """What batches of growing size took.

    Args:
        sizes: The global batch sizes that were tried.
        rates: Examples per second of each, over all replicas, in its quickest update.
        memory: The most bytes that a task had in use by then, on its device, or in RAM.
        suggestion: The smallest size that is as quick as the best, within ``gain``; without one
            the largest.
        reason: Why that one, and why the search ended, in a sentence.
    """

    sizes: list[int]
    rates: list[float]
    memory: list[int]
    suggestion: int
    reason: str


class Memory(NamedTuple):
    """The memory of a task, somewhere.

    Args:
        pool: The same text for tasks that share it.
        used: Bytes that the task has in use.
        peak: The most that it had so far.
        free: Bytes that are left for all who share it; infinite where nobody tells.
    """

    pool: str
    used: int
    peak: int
    free: float


class Wish(NamedTuple):
    """What a task wants of a pool for the next size.

    Args:
        pool: As in `Memory`.
        more: Bytes beyond those in use now.
        free: Those that may be used of what is free now.
        grown: Bytes beyond those in use at the beginning.
        allowed: Those that may be used of what was free at the beginning.
    """

    pool: str
    more: float
    free: float
    grown: float
    allowed: float


@dataclass
class Growth:
    """The memory of one task in one pool, from size to size.

    Args:
        first: Before the first trial.
        part: How much of what is free may be used.
        peaks: The most that was in use, before the first trial and after each.
    """

    first: Memory
    part: float = 1.0
    peaks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.peaks.append(self.first.peak)

    def wish(self, now: Memory) -> Wish:
        """What the next size wants.

        Args:
            now: After the last trial.
        """
        self.peaks.append(now.peak)
        need, free, allowed = self.next_peak(), self.part * now.free, self.part * self.first.free
        more, grown = max(0, need - now.used), max(0, need - self.first.used)
        return Wish(now.pool, more, free, grown, allowed)

    def next_peak(self) -> int:
        """At most what twice the last size will have in use.

        Memory is a part that stays and one that grows with the batch. Two trials that both had
        more in use than ever tell these apart. Else something before had more, and all that is
        above the beginning may grow.
        """
        *_, older, before, last = [0, *self.peaks]
        if len(self.peaks) > 2 and older < before < last:
            return last + 2 * (last - before)
        return self.first.used + 2 * (last - self.first.used)


def find_batch_size(
    trainer: Trainer,
    data: Any,
    low: int | None,
    high: int | None,
    steps: int,
    memory: float,
    gain: float | None,
) -> BatchSizes:
    """As `Trainer.find_batch_size`."""
    check_meets(trainer, "find_batch_size")
    chain, low, high, limit = _checked(trainer, data, low, high)
    if steps < 1 or not 0 < memory <= 1 or not (gain is None or gain >= 0):
        raise UserError(
            f"find_batch_size(steps={steps}, memory={memory}, gain={gain})",
            "1 step or more, memory above 0 and at most 1, and a gain of 0 or more, or None.",
        )
    tell = trainer.coordination.tell_all
    growths = [Growth(each, memory) for each in _memory(trainer)]
    sizes: list[int] = []
    rates: list[float] = []
    peaks: list[int] = []
    end = ""
    with undone(trainer):
        while not end:
            size = 2 * sizes[-1] if sizes else low
            try:
                seconds = _tried(trainer, replace(chain, batch_size=size), steps)
            except (RuntimeError, MemoryError) as error:  # as torch has it on a device and on a CPU
                alone = trainer.coordination.cluster.world_size == 1
                if not (sizes and alone and _is_of_memory(error)):
                    raise
                end = f"memory ran out at {size:,}"
                break
            now = _memory(trainer)
            wishes = [growth.wish(each) for growth, each in zip(growths, now, strict=True)]
            told = [json.loads(text) for text in tell(json.dumps([seconds, now[-1].peak, wishes]))]
            sizes.append(size)
            rates.append(size / max(each for each, *_ in told))
            peaks.append(max(peak for _, peak, _ in told))
            if 2 * size > high:
                end = f"{limit}={high:,} ends the search"
            elif lack := lacks([Wish(*each) for *_, those in told for each in those]):
                end = f"{2 * size:,} may not fit: {lack}"
            elif gain is not None and slower(rates, gain):
                end = f"{sizes[-2]:,} and {size:,} are no quicker"
    number = len(sizes) - 1
    if gain is not None:
        number = next(i for i, rate in enumerate(rates) if rate * (1 + gain) >= max(rates))
    reason = f"{sizes[number]:,}, with {rates[number]:,.0f} examples per second: {end}"
    if trainer.is_chief:
        note("batch size %s", reason)
    return BatchSizes(sizes, rates, peaks, sizes[number], reason)


def _checked(
    trainer: Trainer, data: Any, low: int | None, high: int | None
) -> tuple[Dataset, int, int, str]:
    """The data without a batch size, the smallest size, the largest, and who says so."""
    chain = as_dataset(data, 1)
    if chain.examples is None:
        raise UserError(
            f"find_batch_size of a {type(chain.source).__name__}, which brings its own batches or "
            "does not know how many examples it has",
            "Give a part of it: sp.data.arrays(x, y).",
        )
    least = ROWS * trainer.strategy.num_replicas if low is None else low
    most, limit = (chain.examples, "the number of examples") if high is None else (high, "high")
    if chain.examples < most:
        most, limit = chain.examples, "the number of examples"
    if not 1 <= least <= most:
        raise UserError(
            f"find_batch_size(low={least}, high={most}) with {chain.examples:,} examples",
            "Sizes grow from 1 or more to at most the number of examples.",
        )
    if least < trainer.strategy.num_replicas:
        raise UserError(
            f"low={least} for {trainer.strategy.num_replicas} replicas",
            "Each gets at least one example of a batch.",
        )
    return replace(chain, drop_remainder=True), least, most, limit


def _tried(trainer: Trainer, chain: Dataset, steps: int) -> float:
    """Seconds for a batch in the quickest update, of which the first does not count."""
    seconds = math.inf
    batches = trainer.strategy.distribute(chain, seed=trainer.seed)
    with closing(without_end(batches)) as stream:
        update(trainer, stream)
        for _ in range(steps):
            began = time.perf_counter()
            count = update(trainer, stream).batches
            seconds = min(seconds, (time.perf_counter() - began) / count)
    return seconds


def _memory(trainer: Trainer) -> list[Memory]:
    """This task's memory in RAM, and on its device if that has its own."""
    found = [Memory(host_key(), resident_memory(), peak_memory(), available_memory())]
    device = trainer.strategy.engine.team.device
    if (there := device_memory(device)) is not None:
        found.append(Memory(f"{host_key()}/{device}", *there))
    return found


def lacks(wishes: Sequence[Wish]) -> str:
    """What a pool has too little of, in words; "" where all that is wanted fits.

    Args:
        wishes: Those of all tasks.
    """
    for pool in dict.fromkeys(wish.pool for wish in wishes):
        here = [wish for wish in wishes if wish.pool == pool]
        for wanted, there in (
            (sum(wish.more for wish in here), min(wish.free for wish in here)),
            (sum(wish.grown for wish in here), min(wish.allowed for wish in here)),
        ):
            if wanted > there:
                return f"it may need {in_bytes(wanted)}, of {in_bytes(there)}"
    return ""


def slower(rates: Sequence[float], gain: float) -> bool:
    """Whether the last sizes are no quicker than the best before them.

    Args:
        rates: Examples per second, by size.
        gain: By which part more they must be.
    """
    before, last = rates[:-PATIENCE], rates[-PATIENCE:]
    return bool(before) and max(last) < (1 + gain) * max(before)


def _is_of_memory(error: BaseException) -> bool:
    """Whether an allocation was refused; torch has an error of its own for devices alone."""
    kinds = torch.OutOfMemoryError, MemoryError
    return isinstance(error, kinds) or "can't allocate memory" in str(error)
