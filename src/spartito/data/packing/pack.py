"""Packs a source into shards: what is missing of them, by several threads."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import msgspec
import numpy as np

from spartito.data.blocks.manifest import NAME, VERSION, LeftOut, Manifest, Shard, decode_manifest
from spartito.data.packing.columns import KEY
from spartito.data.packing.destination import Destination, Hashing
from spartito.data.packing.sources import Source, Unread
from spartito.data.packing.writers import Writing
from spartito.data.reading.order import Indices
from spartito.data.reading.progress import Progress
from spartito.errors import UserError
from spartito.system.capacity import available_cores

SHARD = 64_000_000
"""Bytes of a shard, about."""
MOST_THREADS = 16
RECORD_SECONDS = 2.0
"""How often the manifest says which shards are done: the rest is made again after a kill."""


@dataclass(frozen=True)
class Plan:
    """Which examples each shard gets.

    Args:
        order: The examples.
        cuts: The first position of each shard in it, and the number of all.
        suffix: Of the files.
    """

    order: Indices
    cuts: Indices
    suffix: str

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def name(self, shard: int) -> str:
        """The file of a shard."""
        return f"part-{shard:05d}{self.suffix}"

    def indices(self, shard: int) -> list[int]:
        """The examples of a shard."""
        found: list[int] = self.order[self.cuts[shard] : self.cuts[shard + 1]].tolist()
        return found


def make_plan(order: Indices, sizes: Indices, size: int, suffix: str) -> Plan:
    """Cut an order into shards that are about equally large.

    Args:
        order: The examples.
        sizes: The bytes of each example.
        size: Bytes of a shard, about.
        suffix: Of the files.

    Returns:
        Which examples each has, at least one.
    """
    ends = np.cumsum(sizes[order])
    count = min(len(order), max(1, round(int(ends[-1]) / size)))
    wanted = np.searchsorted(ends, ends[-1] * np.arange(1, count) // count, side="right")
    inner = np.unique(np.clip(wanted, 1, max(1, len(order) - 1)))
    cuts = np.concatenate([[0], inner, [len(order)]]).astype(np.int64)
    return Plan(order, np.unique(cuts), suffix)


def pack(
    source: Source,
    destination: Destination,
    writing: Writing,
    format: str,
    seed: int | None,
    size: int = SHARD,
) -> Manifest:
    """Pack a source.

    What was packed before is left as it is, so that a call after a kill does the rest.

    Args:
        source: The examples.
        destination: Where the shards go: empty, or begun by the same call.
        writing: How they are written.
        format: What that is called.
        seed: What the order of examples is drawn from; None: as they lie.
        size: Bytes of a shard, about.

    Returns:
        What was packed.

    Raises:
        UserError: The destination holds something else, an example cannot be written, or none
            can be read.
    """
    options = {"format": format, "size": str(size), "order": "kept" if seed is None else str(seed)}
    begun = Manifest(
        version=VERSION,
        format=format,
        whole=False,
        plan={**source.identity, **options, "writer": writing.version},
        columns={**{column.name: str(column) for column in source.columns}, KEY: "string"},
        names=dict(writing.names),
        example=list(source.example),
        classes=list(source.classes),
        shards=[],
        left_out=[],
    )
    with destination.held():
        found = _taken_up(begun, destination)
        there = set(destination.names())
        found = msgspec.structs.replace(
            found,
            whole=found.whole and all(shard.name in there for shard in found.shards),
            shards=[shard for shard in found.shards if shard.name in there],
        )
        if found.whole:
            return found
        plan = make_plan(source.order(seed), source.sizes, size, writing.suffix)
        done = _Packing(source, destination, writing, plan, found).run()
        if not done.examples:
            raise UserError(
                f"none of {len(plan.order)} examples can be read, the first: "
                f"{done.left_out[0].key}: {done.left_out[0].why}",
                "Is it the right folder?",
            )
        destination.write(NAME, done.encode())
        return done


def _taken_up(begun: Manifest, destination: Destination) -> Manifest:
    """The manifest to go on from, which is there: that of an earlier call, or a new one."""
    names = destination.names()
    if not names:
        destination.write(NAME, begun.encode())
        return begun
    if NAME not in names:
        raise UserError(
            f"{destination.url} holds other files, as {names[0]!r}",
            "Name a new folder: nothing is added to one with something in it.",
        )
    earlier = decode_manifest(destination.read(NAME), destination.url)
    if names == [NAME] and not earlier.whole and not earlier.shards:
        destination.write(NAME, begun.encode())  # nothing came of it
        return begun
    both = {*earlier.plan, *begun.plan}
    differing = sorted(key for key in both if earlier.plan.get(key) != begun.plan.get(key))
    if differing:
        what = "packed data" if earlier.whole else "a part of packed data"
        then = ", ".join(f"{key} {earlier.plan.get(key, '')}".strip() for key in differing)
        now = ", ".join(f"{key} {begun.plan.get(key, '')}".strip() for key in differing)
        raise UserError(
            f"{destination.url} holds {what} of {then}; now it is {now}",
            "Name a new folder, or give the options of before.",
        )
    return earlier


@dataclass
class _Packing:
    """The shards that are missing, in the making."""

    source: Source
    destination: Destination
    writing: Writing
    plan: Plan
    manifest: Manifest
    _examples: int = 0
    _counting: threading.Lock = field(default_factory=threading.Lock)
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> Manifest:
        """All shards, as a manifest that is whole and not written yet."""
        shards = {shard.name: shard for shard in self.manifest.shards}
        left_out = defaultdict[str, list[LeftOut]](list)
        for each in self.manifest.left_out:
            left_out[each.shard].append(each)
        missing = [n for n in range(len(self.plan)) if self.plan.name(n) not in shards]
        self._examples = len(self.plan.order) - sum(len(self.plan.indices(n)) for n in missing)
        recorded = time.monotonic()
        with Progress("packed", things="examples") as progress:
            for shard, unread in self._made(missing, progress):
                shards[shard.name], left_out[shard.name] = shard, unread
                if time.monotonic() - recorded >= RECORD_SECONDS:
                    self.destination.write(NAME, self._with(shards, left_out, False).encode())
                    recorded = time.monotonic()
        return self._with(shards, left_out, True)

    def _with(
        self, shards: dict[str, Shard], left_out: dict[str, list[LeftOut]], whole: bool
    ) -> Manifest:
        names = [self.plan.name(n) for n in range(len(self.plan))]
        return msgspec.structs.replace(
            self.manifest,
            whole=whole,
            shards=[shards[name] for name in names if name in shards],
            left_out=[each for name in names for each in left_out.get(name, [])],
        )

    def _made(
        self, missing: Sequence[int], progress: Progress
    ) -> Iterator[tuple[Shard, list[LeftOut]]]:
        """Shards as they are done."""
        threads = min(MOST_THREADS, available_cores())
        waiting = iter(missing)
        running: set[Future[tuple[Shard, list[LeftOut]]]] = set()
        with ThreadPoolExecutor(threads, thread_name_prefix="spartito pack") as pool:
            try:
                while True:
                    while len(running) < threads and (shard := next(waiting, None)) is not None:
                        running.add(pool.submit(self._make, shard))
                    if not running:
                        return
                    done, running = wait(running, 0.5, FIRST_COMPLETED)
                    progress.update(self._examples, len(self.plan.order))
                    yield from (each.result() for each in done)
            finally:
                self._over.set()

    def _make(self, shard: int) -> tuple[Shard, list[LeftOut]]:
        name, left_out, examples = self.plan.name(shard), list[LeftOut](), 0
        with self.destination.new(name) as file:
            hashing = Hashing(file)
            writer = self.writing.begin(hashing)
            try:
                for row in self.source.rows(self.plan.indices(shard)):
                    if self._over.is_set():
                        raise _StoppedError
                    if isinstance(row, Unread):
                        left_out.append(LeftOut(name, row.key, row.why))
                    else:
                        writer.add(row)
                        examples += 1
                    with self._counting:
                        self._examples += 1
            finally:  # after an error too: a writer that is forgotten writes when it goes
                writer.close()
        return Shard(name, hashing.size, hashing.sha256, examples), left_out


class _StoppedError(Exception):
    """Another shard could not be made, or somebody interrupted."""
