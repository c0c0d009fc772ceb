"""``spartito data bench``: how many examples this machine reads, decodes and feeds in a second.

Each rate is taken by itself, for some seconds: bytes that come from a disk or store by many
threads; what one core decodes of bytes in memory; batches as training gets them. Reading and
feeding are measured twice, first with nothing of it in memory or in the cache, then again.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from json import dumps
from typing import Any, Protocol

from spartito.data.blocks.formats import Columns
from spartito.data.blocks.locating import PackedSet, images_at, locate, open_set
from spartito.data.blocks.reading import THREADS, BlockFiles
from spartito.data.blocks.source import PackedSource
from spartito.data.dataset import Dataset
from spartito.data.images.decode import pixels_of, read_bytes
from spartito.data.images.headers import READABLE, ImageFault, promised_format, sniff
from spartito.data.images.image_source import ImageFolder
from spartito.data.reading.order import permutation
from spartito.data.reading.prefetch import reading_threads
from spartito.data.sets.folders import image_folder
from spartito.errors import UserError, show
from spartito.names import plural, size
from spartito.storage.span_cache import SpanCache
from spartito.system import forget_file
from spartito.system.capacity import available_cores
from spartito.urls import is_remote

LIVE = 16
"""Blocks among which examples are shuffled."""
HELD = 64 << 20
"""Bytes that are decoded again and again, at most."""

Size = tuple[int, int]


@dataclass(frozen=True)
class Rate:
    """What was done in a time.

    Attributes:
        examples: How many.
        seconds: In how long.
        bytes: Of how many bytes, where that is known.
    """

    examples: int
    seconds: float
    bytes: int = 0

    @property
    def per_second(self) -> float:
        """Examples in a second."""
        return self.examples / max(self.seconds, 1e-9)

    @property
    def bytes_per_second(self) -> float:
        """Bytes in a second."""
        return self.bytes / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Rates:
    """All that is measured of a data set.

    Attributes:
        read_cold: Bytes from where they lie.
        read_warm: The same again, from memory or the cache.
        decode: By one core.
        feed_cold: Batches as training gets them, in its first epoch.
        feed_warm: The same again.
        cores: That this process has.
        load: The machine's load average before.
    """

    read_cold: Rate
    read_warm: Rate
    decode: Rate
    feed_cold: Rate
    feed_warm: Rate
    cores: int
    load: float


class Measured(Protocol):
    """A data set that can be measured."""

    url: str
    medium: str
    """Where it lies, in a word."""

    def forget(self) -> None:
        """Have nothing of it in memory or in the cache, as far as this process can."""
        ...

    def read(self) -> Iterator[tuple[int, Callable[[], int]]]:
        """Parts of it: how many examples each has, and what reads it and returns its bytes."""
        ...

    def decode(self) -> Iterator[Callable[[], int]]:
        """What decodes examples that are in memory, and returns how many."""
        ...

    def dataset(self) -> Dataset:
        """As training opens it, without batches."""
        ...


class MeasuredImages:
    """A folder of images.

    Args:
        path: The folder.
        image_size: To which images are decoded.
    """

    medium = "disk"

    def __init__(self, path: str, image_size: Size) -> None:
        self.url, self._size = path, image_size
        self._data = image_folder(path, image_size)
        source = self._data.source
        assert isinstance(source, ImageFolder)
        order = permutation(len(source), 0, 0).tolist()
        self._paths = [source.paths[index] for index in order]

    def forget(self) -> None:
        """As `Measured.forget`."""
        for path in self._paths:
            forget_file(path)

    def read(self) -> Iterator[tuple[int, Callable[[], int]]]:
        """As `Measured.read`."""
        return ((1, partial(_bytes_of_file, path)) for path in self._paths)

    def decode(self) -> Iterator[Callable[[], int]]:
        """As `Measured.decode`."""
        held: list[tuple[str, bytes]] = []
        taken = 0
        for path in self._paths:
            with suppress(ImageFault):
                held.append((path, read_bytes(path)))
                taken += len(held[-1][1])
            if taken > HELD:
                break
        return (partial(_decode_image, data, path, self._size) for path, data in cycle(held))

    def dataset(self) -> Dataset:
        """As `Measured.dataset`."""
        return self._data.shuffle(0)


class MeasuredPacked:
    """Packed files.

    Args:
        url: As they were named.
        data: They.
        image_size: To which images are decoded.
        folder: For a cache of its own.
    """

    def __init__(self, url: str, data: PackedSet, image_size: Size, folder: str) -> None:
        self.url = url
        self.medium = "disk" if data.where.files.local else "store"
        self._data, self._folder = data, folder
        first = data.reader.get([0])[0]
        self._size = image_size if _has_images(first) else None
        self._order = permutation(len(data.blocks), 0, 0).tolist()
        self._new_cache()

    def _new_cache(self) -> None:
        where, blocks = self._data.where, self._data.blocks
        self._cache = None
        if not where.files.local:
            self._cache = SpanCache(tempfile.mkdtemp(dir=self._folder))
        self._read_blocks = BlockFiles(where.files, self._data.format, blocks, self._cache)

    def forget(self) -> None:
        """As `Measured.forget`."""
        self._new_cache()
        if self._data.where.files.local:
            for file in self._data.blocks.files:
                forget_file(os.path.join(self._data.where.files.url, file.name))

    def read(self) -> Iterator[tuple[int, Callable[[], int]]]:
        """As `Measured.read`."""
        blocks = self._data.blocks
        return ((blocks.block(each).rows, partial(self._read, each)) for each in self._order)

    def _read(self, block: int) -> int:
        return sum(len(data) for _, data in self._read_blocks.parts(block))

    def decode(self) -> Iterator[Callable[[], int]]:
        """As `Measured.decode`."""
        held: dict[int, Any] = {}
        taken = 0
        for block in self._order:
            held[block] = self._read_blocks.parts(block)
            taken += sum(len(data) for _, data in held[block])
            if taken > HELD:
                break
        blocks = ((block, parts) for block, parts in cycle(list(held.items())))
        return (step for block, parts in blocks for step in self._steps(block, parts))

    def _steps(self, block: int, parts: Any) -> Iterator[Callable[[], int]]:
        """A block in steps: it alone, then its examples."""
        columns: Columns = {}

        def open_block() -> int:
            columns.update(self._read_blocks.decoded(block, parts))
            return 0

        def decode_row(row: int) -> int:
            for values in columns.values():
                value = values[row]
                if self._size is not None and isinstance(value, bytes):
                    with suppress(ImageFault):
                        pixels_of(value, None, self._size, "rgb")
            return 1

        yield open_block
        for row in range(self._data.blocks.block(block).rows):
            yield partial(decode_row, row)

    def dataset(self) -> Dataset:
        """As `Measured.dataset`."""
        data = self._data
        source = PackedSource(
            data.where.files, data.format, data.blocks, self._cache, data.columns, self._size
        )
        threads = reading_threads()
        return Dataset(source).prefetch(threads + 2, threads).shuffle(0, LIVE)


def measure(data: Measured, seconds: float, batch_size: int, told: Callable[[str], None]) -> Rates:
    """Measure a data set.

    Args:
        data: It.
        seconds: For each rate, at most.
        batch_size: Of what is fed.
        told: Hears what is measured next.

    Returns:
        All rates.
    """
    load = os.getloadavg()[0]
    told(f"reading from the {data.medium}")
    data.forget()
    read_cold = _read(data, seconds)
    told("reading again")
    read_warm = _read(data, seconds)
    told("decoding by one core")
    decode = _timed(((step(), 0) for step in data.decode()), seconds)
    told("feeding batches")
    data.forget()
    feed_cold = _feed(data, seconds, batch_size)
    told("feeding again")
    feed_warm = _feed(data, seconds, batch_size)
    return Rates(read_cold, read_warm, decode, feed_cold, feed_warm, available_cores(), load)


def limits(rates: Rates, medium: str) -> str:
    """What limits the examples of a second, in a sentence for each epoch.

    Args:
        rates: As measured.
        medium: Where the data lies, in a word.
    """
    decoded = rates.decode.per_second * rates.cores
    cores = plural(rates.cores, "core")

    def said(epoch: str, read: Rate, feed: Rate, where: str) -> str:
        limit = min(read.per_second, decoded)
        if feed.per_second < limit / 2:
            return (
                f"{epoch} neither the {where} ({read.per_second:,.0f}/s) nor decoding "
                f"({decoded:,.0f}/s by {cores}) limits, but what makes batches of examples."
            )
        if read.per_second < decoded:
            return (
                f"{epoch} the {where} limits: {read.per_second:,.0f} examples a second arrive "
                f"({size(read.bytes_per_second)}/s), {cores} could decode {decoded:,.0f}."
            )
        return (
            f"{epoch} decoding limits: {rates.decode.per_second:,.0f} examples a second by each "
            f"of {cores}; the {where} gives {read.per_second:,.0f}."
        )

    warm = "memory of the system" if medium == "disk" else "cache"
    first = said("In the first epoch", rates.read_cold, rates.feed_cold, medium)
    later = said("Later", rates.read_warm, rates.feed_warm, warm)
    if rates.load > rates.cores / 2:
        later += f" Other programs had cores too (load {rates.load:.1f}): these figures are low."
    return f"{first} {later}"


def main_bench(
    url: str,
    seconds: float = 5.0,
    columns: Sequence[str] = (),
    image_size: int = 180,
    batch_size: int = 32,
    json: bool = False,
) -> int:
    """Measure, say what limits, and return the exit code: 0, or 2 for the user's mistake."""
    try:
        with tempfile.TemporaryDirectory(prefix="spartito-bench-") as folder:
            data = open_measured(url, columns, (image_size, image_size), folder)
            rates = measure(data, seconds, batch_size, _say)
            limit = limits(rates, data.medium)
    except UserError as error:
        return show(error)
    print(dumps(as_facts(data.url, rates, limit)) if json else as_text(data.url, rates, limit))
    return 0


def open_measured(url: str, columns: Sequence[str], image_size: Size, folder: str) -> Measured:
    """What is to be measured.

    Args:
        url: A folder of images, or packed files.
        columns: Those of packed files that an example has; () takes what `packed` takes.
        image_size: To which images are decoded.
        folder: For a cache of its own.

    Raises:
        UserError: There is no such thing.
    """
    path = images_at(url)
    if path is None:
        where = locate(url)
        return MeasuredPacked(url, open_set(where, where.named(columns)), image_size, folder)
    if columns:
        raise UserError(f"--columns of {url}, a folder of images", "Leave the option out.")
    if is_remote(path):
        raise UserError(
            f"{url} is a folder of images in a store, which is not measured",
            "Pack it: in a store few large files are read faster than many small ones.",
        )
    return MeasuredImages(path, image_size)


def as_facts(url: str, rates: Rates, limit: str) -> dict[str, Any]:
    """The rates as JSON."""
    named = {name: getattr(rates, name) for name in vars(rates) if name not in ("cores", "load")}
    facts = {
        name: {
            "examples": rate.examples,
            "seconds": rate.seconds,
            "per_second": rate.per_second,
            **({"bytes": rate.bytes} if rate.bytes else {}),
        }
        for name, rate in named.items()
    }
    return {"url": url, "cores": rates.cores, "load": rates.load, **facts, "limit": limit}


def as_text(url: str, rates: Rates, limit: str) -> str:
    """The rates for a reader."""

    def line(what: str, rate: Rate) -> str:
        speed = f"  {size(rate.bytes_per_second)}/s" if rate.bytes else ""
        return f"  {what:<24}{rate.per_second:>12,.0f} examples/s{speed}"

    return "\n".join(
        [
            url,
            line("read, cold", rates.read_cold),
            line("read, again", rates.read_warm),
            line("decoded by one core", rates.decode),
            line("fed, cold", rates.feed_cold),
            line("fed, again", rates.feed_warm),
            limit,
        ]
    )


def _read(data: Measured, seconds: float) -> Rate:
    """Read parts by many threads until the time is over."""

    def done() -> Iterator[tuple[int, int]]:
        parts = data.read()
        with ThreadPoolExecutor(THREADS) as pool:
            while wave := list(islice(parts, 2 * THREADS)):
                sizes = pool.map(lambda part: part[1](), wave)
                yield from zip((examples for examples, _ in wave), sizes, strict=True)

    return _timed(done(), seconds)


def _feed(data: Measured, seconds: float, batch_size: int) -> Rate:
    """Take batches until the time is over; corrupt examples count."""
    from spartito.data.reading.loader import Loader

    batches = Loader(data.dataset().skip_corrupt(sys.maxsize).batch(batch_size))
    return _timed(((batch.global_size, 0) for batch in batches), seconds)


def _timed(steps: Iterable[tuple[int, int]], seconds: float) -> Rate:
    """Take steps, each of some examples and bytes, until they or the time are over."""
    examples = taken = 0
    began = time.perf_counter()
    for more, data in steps:
        examples, taken = examples + more, taken + data
        if time.perf_counter() - began >= seconds:
            break
    return Rate(examples, time.perf_counter() - began, taken)


def _say(what: str) -> None:
    print(f"measuring: {what}", file=sys.stderr, flush=True)


def _has_images(block: Columns) -> bool:
    return any(
        isinstance(value, bytes) and sniff(value) in READABLE
        for values in block.values()
        for value in islice(values, 8)
    )


def _bytes_of_file(path: str) -> int:
    with suppress(ImageFault):
        return len(read_bytes(path))
    return 0


def _decode_image(data: bytes, path: str, image_size: Size) -> int:
    with suppress(ImageFault):
        pixels_of(data, promised_format(path), image_size, "rgb")
    return 1
