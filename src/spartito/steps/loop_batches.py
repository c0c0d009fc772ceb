"""What a loop of the user's own trains with, as far as tasks compare it or are warned of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from zlib import crc32

from spartito.data.batch import Batch
from spartito.notes import warn


@dataclass
class LoopState:
    """What is to be known of a loop of the user's own when its strategy is gone.

    Attributes:
        unseen: Whether a loop of the user's own got batches since the replicas were compared last.
        in_groups: Whether this is the chief of groups that train apart.
    """

    unseen: bool = False
    in_groups: bool = False


class LoopBatches:
    """The batches that loops of the user's own got, and those that they gave to backward passes.

    Args:
        state: What is known of these loops.
    """

    def __init__(self, state: LoopState) -> None:
        self._state = state
        self.order = 0
        """A checksum of what they trained with since the last comparison."""
        self.passes = 0
        """How many batches they have given to backward passes."""
        self.drawn = 0
        """`Batch.drawn` of the last one, also of `fit`."""
        self._given = deque[tuple[int, int, int, int]](maxlen=32)
        self._sources: dict[int, int] = {}
        self._said = False

    def compared(self) -> None:
        """All tasks have trained with the same so far."""
        self._state.unseen, self.order = False, 0

    def met(self, batch: Batch, source: object) -> None:
        """A loop gets a batch.

        Args:
            batch: The loop has it until `done_with`.
            source: Where it comes from.
        """
        self._state.unseen = True
        self._sources[id(batch)] = id(source)

    def saw(self, batch: Batch) -> None:
        """A backward pass is of this batch; of those of `fit` no more is kept than `drawn`."""
        before, self.drawn = self.drawn, batch.drawn
        if not self._state.unseen:
            return
        self.passes += 1
        key = id(batch)
        self._given.append((key, self._sources.get(key, 0), batch.size, batch.global_size))
        if batch.drawn != before or not self.order:
            self.order = crc32(b"%d" % batch.drawn, self.order)

    def done_with(self, batch: Batch, source: object, since: int) -> None:
        """Warn of a batch that may be in a loss which is weighed as another one.

        Its part here is another part of the whole than that of the batch which `backward` was
        given, as where the last ones have other sizes.

        Args:
            batch: As `met` was given.
            source: Likewise.
            since: `passes` when the batch came.
        """
        self._sources.pop(id(batch), None)
        if self._said or self.passes == since:
            return
        given = list(self._given)[since - self.passes :]
        if any(key == id(batch) for key, *_ in given):
            return
        for _, other, size, whole in given:
            if other != id(source) and size * batch.global_size != batch.size * whole:
                self._said = True
                warn(
                    "a loss of two batches of which this replica has other parts, %d of %d "
                    "examples and %d of %d, is weighed by the one that strategy.backward() was "
                    "given: the numbers depend on how many replicas there are. Call it for each "
                    "batch with its own loss, then update(). If the other batch is in no loss, "
                    "nothing is wrong",
                    size, whole, batch.size, batch.global_size,
                )  # fmt: skip
                return
