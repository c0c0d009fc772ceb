"""One replica's batches, as `distribute` gives them out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol
from zlib import crc32

import torch
from msgspec import structs
from torch import Tensor

from spartito.collectives.collective import Collective
from spartito.data.batch import Batch
from spartito.data.reading.collate import head, without_rows
from spartito.data.reading.loader import SPARE, Loader
from spartito.data.reading.placing import Placing
from spartito.engine.devices.denormals import Denormals
from spartito.errors import UserError
from spartito.outer.joined_groups import JoinedGroups
from spartito.steps.distributed import Distributed, Figures, StepResult
from spartito.steps.outer_loops.group_state import SECTION
from spartito.steps.prepared import Pairs

WAITING = "accumulated"
"""In a position: how many batches before it wait for their update."""


class Share(Protocol):
    """Where one replica's batches come from: a `Loader`, or what stands around it."""

    def __iter__(self) -> Iterator[Batch]:
        """From the present position to the end of the epoch."""
        ...

    def endless(self) -> Iterator[Batch]:
        """From the present position on, epoch after epoch."""
        ...

    def state_dict(self) -> dict[str, int]:
        """The position of the next batch."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to that position."""
        ...


class Placed(Distributed):
    """Batches on the strategy's device, each announced to the modules that want to know."""

    overlaps = False
    near: JoinedGroups | None = None
    """The tasks of one's own site by their groups, where results are those of a group alone."""

    @property
    def alike(self) -> bool:  # type: ignore[override]
        """As `Distributed.alike`."""
        return self.near is None

    def __init__(
        self,
        batches: Share,
        placing: Placing,
        announce: Callable[[Batch], None],
        group: Collective,
        denormals: Denormals,
        pairs: Pairs | None = None,
        counted: Callable[[list[bytes]], list[bytes]] = list,
        follow: Callable[[], None] | None = None,
    ) -> None:
        """``group`` is that of the data shards; ``pairs`` are what these batches train.

        ``counted`` makes of the metrics of all data shards those of who has seen outputs.
        ``follow`` is called before the first batch of each epoch.
        """
        self._batches, self._placing, self._announce = batches, placing, announce
        self._group, self._denormals, self._pairs = group, denormals, pairs
        self._counted, self._follow = counted, follow
        self._begins = True
        self.length: int | None = None
        """The global batches of a pass, where that is known."""
        self.before: Callable[[], None] = lambda: None
        """Is called before a batch is announced."""
        self._order, self._alike, self._like = 0, 0, (0, 0)
        self.waited = 0.0

    def __len__(self) -> int:
        return super().__len__() if self.length is None else self.length

    def __iter__(self) -> Generator[Batch]:
        self._begins = True
        return self._denormals.during(self._unseen(self._on_device(iter(self._batches))))

    def _unseen(self, batches: Generator[Batch]) -> Generator[Batch]:
        """Batches of a loop of the user's own, in which nobody else compares replicas."""
        pairs = self._pairs
        if pairs is None:
            yield from batches
            return
        for batch in batches:
            pairs.batches.met(batch, self)
            since = pairs.batches.passes
            try:
                yield batch
            finally:
                pairs.batches.done_with(batch, self, since)

    def epochs(
        self, count: int, steps: int | None, done: int, figures: Figures | None = None
    ) -> Generator[Generator[Batch]]:
        return self._denormals.during(self._epochs(count, steps, done))

    def _epochs(self, count: int, steps: int | None, done: int) -> Generator[Generator[Batch]]:
        if steps is None:
            for _ in range(count):
                self._begins = True
                yield self._on_device(iter(self._batches))
            return
        stream = self._on_device(self._batches.endless())  # stays open, with what it has read ahead
        try:
            for _ in range(count):
                self._begins = True
                yield _next(stream, steps - done)
                done = 0
        finally:
            stream.close()

    def watch(self) -> Iterator[StepResult]:
        return iter(())

    def total(self, shared: Sequence[float], own: Sequence[float]) -> list[float]:
        if self.near is not None:  # a group's tasks have the same sums
            counts = float(self.near.is_leader)
            own = [*(value * counts for value in shared), *own]
            shared = ()
        if not own:
            return list(shared)
        both = self._group.all_reduce(torch.tensor(own, dtype=torch.float64))
        return [*shared, *both.tolist()]

    def gather(self, rows: Tensor) -> Tensor:
        return torch.cat(self._group.all_gather_rows(rows))

    def collect(self, own: bytes) -> list[bytes]:
        return self._counted(self._group.all_gather_bytes(own))

    @property
    def seen(self) -> tuple[Any, ...]:
        """What `order` knows of the batches so far; may be set, as the position may."""
        return self._order, self._alike, self._like

    @seen.setter
    def seen(self, known: tuple[Any, ...]) -> None:
        self._order, self._alike, like = known
        self._like = tuple(like)

    def order(self) -> int:
        self._note((0, 0))
        return self._order

    def _note(self, following: tuple[int, int]) -> None:
        """Count what is alike in a row: a checksum for each batch takes 5 us of its step."""
        if self._alike:
            self._order = crc32(b"%d %d %d" % (*self._like, self._alike), self._order)
        self._alike, self._like = 0, following

    def state_dict(self) -> dict[str, Any]:
        passes = self._pairs.only.passes if self._pairs is not None else 0
        waiting = {WAITING: passes} if passes else {}
        return {**self._batches.state_dict(), **waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches.load_state_dict(state)
        if self._pairs is not None and state.get(WAITING):
            self._pairs.only.go_on_accumulating(self._rank)

    @property
    def _rank(self) -> int:
        """This task's among those whose waiting gradients are summed; the first takes what was."""
        saved = None if self._pairs is None else self._pairs.only.saved
        if self.near is not None and saved and SECTION in saved:
            return self.near.inside.rank
        return self._group.rank

    def _on_device(self, batches: Iterator[Batch]) -> Generator[Batch]:
        move = self._placing.move if self._placing.moves else None
        for batch in batches:
            if move is not None:
                batch = structs.replace(batch, data=move(batch.data), spare=move(batch.spare))
            self.before()
            if self._begins:
                self._begins = False
                if self._follow is not None:
                    self._follow()
            self._announce(batch)
            if (batch.drawn, batch.global_size) != self._like:
                self._note((batch.drawn, batch.global_size))
            self._alike += 1
            yield batch


def _next(stream: Iterator[Batch], count: int) -> Generator[Batch]:
    """The next batches of a stream, which stays open when this ends."""
    yield from islice(stream, count)


class Together(Share):
    """Sources of unequal length: who ran out goes on with empty batches until all have ended.

    Local batches may differ in size too: each is told how large the global one has become. The
    position counts these common steps, so it is the same on all replicas.
    """

    def __init__(self, loader: Loader, collective: Collective) -> None:
        self._loader, self._collective = loader, collective
        self._position = loader.state_dict()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield from self._rest_of_pass()
            if self._loader.begins_epoch:
                return

    def endless(self) -> Iterator[Batch]:
        while True:
            yield from self

    def state_dict(self) -> dict[str, int]:
        return dict(self._position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)
        self._position = self._loader.state_dict()

    def _rest_of_pass(self) -> Iterator[Batch]:
        position, last = self._position, None
        batches = self._loader.rest_of_pass()
        while True:
            batch = next(batches, None)
            mine = torch.tensor([-1 if batch is None else batch.size])
            sizes = [int(size) for size in self._collective.all_gather(mine)]
            if max(sizes) < 0:
                break
            last = batch or last or self._first()
            sizes = [max(0, size) for size in sizes]
            first = sum(sizes[: self._collective.rank])
            found = batch or _emptied(last)
            offsets = torch.arange(first, first + found.size)
            step, position["step"] = position["step"], position["step"] + 1
            yield structs.replace(found, global_size=sum(sizes), offsets=offsets, step=step)
        if not position["step"]:
            raise self._loader.nothing()
        position["step"] = 0
        self.load_state_dict(position)
        self._loader.next_pass()
        self._position = self._loader.state_dict()

    def _first(self) -> Batch:
        """The first batch of a pass: what the rest would look like where this source has none."""
        position = self._loader.state_dict()
        self._loader.load_state_dict({**position, "step": 0})
        found = next(iter(self._loader.rest_of_pass()), None)
        self._loader.load_state_dict(position)
        if found is None:
            raise UserError("a replica's source has no batch at all", "Give each some data.")
        return found


def _emptied(batch: Batch) -> Batch:
    data = without_rows(batch.data, batch.size)
    spare = batch.spare
    if batch.size:
        found = head(batch.data, SPARE, batch.size)
        spare = batch.data if found is None else found
    return structs.replace(batch, data=data, size=0, offsets=batch.offsets[:0], spare=spare)
