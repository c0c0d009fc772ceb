"""The global batches of one stream in a row: which pass, step and epoch each of them has.

All the book-keeping of leases is done in the numbers of this row: 0 is the plan's first global
batch. Where nobody knows how long a pass is, its end moves the later passes once it is found.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

OPEN = 1 << 62
"""Stands for an end that nobody knows yet."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a stream of global batches is, equal on all tasks: one fit, or one custom pass.

    slices            how many tasks compute: each global batch has so many work items
    steps_per_pass    global batches of a pass; None: found by reading
    passes_per_epoch  passes of an epoch; without meaning where ``epoch_steps`` is given
    epoch_steps       global batches of a virtual epoch; None: whole passes
    epochs            how many epochs; they are counted from 0 in this plan
    start             (pass, step) of the first global batch
    first_epoch_done  global batches of the first epoch that were done before
    gated             no work item of epoch e + 1 before epoch e is closed
    together          leases go to all live workers as one group; implies ``gated``
    multiple          lease lengths are multiples of it, but for the end of a pass or epoch
    accumulate        global batches of a global step; 0: ``multiple``
    fixed_length      a lease has ``multiple`` work items, however fast the worker is: equal in all
                      runs, and so are the sums of what is reported for leases
    """

    data_shards: int
    steps_per_pass: int | None
    passes_per_epoch: int | None
    epoch_steps: int | None
    epochs: int
    start: tuple[int, int] = (0, 0)
    first_epoch_done: int = 0
    gated: bool = False
    together: bool = False
    multiple: int = 1
    accumulate: int = 0
    fixed_length: bool = False

    def __post_init__(self) -> None:
        if self.epoch_steps is None and self.passes_per_epoch is None:
            raise ValueError("an epoch without an end")
        if min(self.data_shards, self.multiple) < 1 or min(self.epochs, self.first_epoch_done) < 0:
            raise ValueError(f"no such plan: {self}")
        if 0 in (self.steps_per_pass, self.passes_per_epoch, self.epoch_steps):
            raise ValueError(f"an epoch without batches: {self}")


@dataclass(slots=True)
class Pass:
    """Global batches ``first`` to ``stop`` are the steps of pass ``number`` from ``step`` on."""

    number: int
    step: int
    first: int
    stop: int


class BatchIndex:
    """Finds the pass, step and epoch of a global batch, and the batch of a pass and step."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        number, step = plan.start
        self.passes = [Pass(number, step, 0, self._length(step))]
        """Those that are known, in order."""

    def at(self, batch: int) -> Pass:
        """The pass that global batch ``batch`` belongs to."""
        while self.passes[-1].stop <= batch:
            self._extend()
        return self.passes[bisect_right(self.passes, batch, key=lambda p: p.first) - 1]

    def locate(self, batch: int) -> tuple[int, int]:
        """(pass, step) of global batch ``batch``."""
        found = self.at(batch)
        return found.number, found.step + batch - found.first

    def find(self, number: int, step: int) -> int | None:
        """The global batch that is step ``step`` of pass ``number``; None: not in this row."""
        found = self._pass(number)
        if found is None or step < found.step:
            return None
        batch = found.first + step - found.step
        return batch if batch < found.stop else None

    def past(self, number: int, step: int) -> int | None:
        """How many global batches there are before step ``step`` of pass ``number``, its end too.

        None: it is not in this row.
        """
        found = self._pass(number)
        if found is None or not found.step <= step <= found.step + found.stop - found.first:
            return None
        return found.first + step - found.step

    def epoch(self, batch: int) -> int:
        """The epoch that global batch ``batch`` belongs to."""
        plan = self._plan
        if plan.epoch_steps is not None:
            return (batch + plan.first_epoch_done) // plan.epoch_steps
        return self.at(batch).number // self._repeats - plan.start[0] // self._repeats

    def stop(self, epoch: int) -> int:
        """The number of global batches up to the end of ``epoch``; `OPEN` if not known yet.

        No epoch ends after the plan's last one.
        """
        plan = self._plan
        epoch = min(epoch, plan.epochs - 1)
        if epoch < 0:
            return 0
        if plan.epoch_steps is not None:
            return max(0, (epoch + 1) * plan.epoch_steps - plan.first_epoch_done)
        last = self._pass((plan.start[0] // self._repeats + epoch + 1) * self._repeats - 1)
        return OPEN if last is None else last.stop

    def updates(self, batch: int) -> int:
        """The global steps that the batches before ``batch`` make: one for ``accumulate`` of them.

        The last one of a pass or epoch may be of fewer.
        """
        count = at = 0
        while at < batch:
            end = max(at + 1, min(self.at(at).stop, self.stop(self.epoch(at))))
            stop, each = min(end, batch), self._plan.accumulate or self._plan.multiple
            count += -(-(stop - at) // each) if stop == end else (stop - at) // each
            at = stop
        return count

    def end(self, number: int, step: int, reached: int) -> int | None:
        """Pass ``number`` turned out to have ``step`` steps; returns the batch after its last.

        The first to find the end of a pass is believed, but batches below ``reached`` were
        there. None where the end was known before.
        """
        last = self.passes[-1]
        if number != last.number or last.stop != OPEN:
            return None
        last.stop = max(last.first, reached, last.first + step - last.step)
        self._extend()
        return last.stop

    @property
    def _repeats(self) -> int:
        return self._plan.passes_per_epoch or 1

    def _length(self, step: int) -> int:
        steps = self._plan.steps_per_pass
        return OPEN if steps is None else max(0, steps - step)

    def _extend(self) -> None:
        last = self.passes[-1]
        length = self._length(0)
        self.passes.append(Pass(last.number + 1, 0, last.stop, min(OPEN, last.stop + length)))

    def _pass(self, number: int) -> Pass | None:
        index = number - self._plan.start[0]
        if index < 0:
            return None
        while index >= len(self.passes) and self.passes[-1].stop != OPEN:
            self._extend()
        return self.passes[index] if index < len(self.passes) else None
