"""How many tokens each block has: counted once, and kept in the cache."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from itertools import accumulate

import msgspec
import numpy as np

from spartito.data.reading.order import Indices
from spartito.data.reading.progress import Progress
from spartito.data.windows.token_blocks import VERSION, TokenBlocks
from spartito.errors import UserError
from spartito.notes import warn
from spartito.storage.span_cache import Entry

PARTS = 4
"""Parts that are counted together; other tasks of the machine count others."""


class PartCounts(msgspec.Struct, frozen=True):
    """What is known of a part: of a file.

    Attributes:
        tokens: How many each block has.
        documents: How many documents there are that have tokens.
        missing: How many documents cannot be read.
        first: The first of these, and why; "" where there is none.
    """

    tokens: list[int]
    documents: int
    missing: int = 0
    first: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PartCounts)


def count_tokens(blocks: TokenBlocks, threads: int) -> Indices:
    """How many tokens each block has; those of a part that was counted before are in the cache.

    Args:
        blocks: The blocks.
        threads: How many of them are counted together.

    Returns:
        int64, ``(blocks,)``. Documents that cannot be read have none; a warning says how many.

    Raises:
        UserError: A block cannot be read, or more than 1% of the documents (at least 10).
    """
    parts = blocks.documents.parts
    edges = [0, *accumulate(part.blocks for part in parts)]
    done, lock = 0, threading.Lock()

    def told(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress.update(done, edges[-1])

    def one(block: int) -> tuple[int, int, int, str]:
        made = blocks.load(block)
        told(1)
        return len(made.tokens), len(made.starts), made.missing, made.first

    def of_part(number: int) -> PartCounts:
        first, stop = edges[number], edges[number + 1]
        was_made = False

        def make() -> bytes:
            nonlocal was_made
            was_made = True
            futures = [workers.submit(one, block) for block in range(first, stop)]
            return _encoder.encode(_together(_results(futures)))

        identity = parts[number].identity
        if identity is None:
            return _decoder.decode(make())
        entry = Entry(("token counts", VERSION, *identity, *blocks.encoding.words))
        made = _decoder.decode(blocks.cache.get(entry, make))
        if not was_made:
            told(stop - first)
        return made

    counts: dict[int, PartCounts] = {}
    with (
        Progress("counted the tokens of", things="blocks") as progress,
        ThreadPoolExecutor(threads) as workers,
        ThreadPoolExecutor(PARTS) as pool,
    ):
        work = {pool.submit(of_part, number): number for number in range(len(parts))}
        try:
            for ready in as_completed(work):
                counts[work[ready]] = ready.result()
        except BaseException:
            workers.shutdown(wait=False, cancel_futures=True)
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    ordered = [counts[number] for number in range(len(parts))]
    _check_missing(ordered, [part.name for part in parts])
    return np.array([count for each in ordered for count in each.tokens], dtype=np.int64)


def _results(
    futures: Sequence[Future[tuple[int, int, int, str]]],
) -> list[tuple[int, int, int, str]]:
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def _together(counts: list[tuple[int, int, int, str]]) -> PartCounts:
    """What is known of a part, by its blocks."""
    said = (f"block {number}, {text}" for number, (*_, text) in enumerate(counts) if text)
    tokens, documents, missing, _ = zip(*counts, strict=True) if counts else ((), (), (), ())
    return PartCounts(list(tokens), sum(documents), sum(missing), next(said, ""))


def _check_missing(counts: list[PartCounts], names: list[str]) -> None:
    missing, documents = sum(c.missing for c in counts), sum(c.documents for c in counts)
    if not missing:
        return
    name, first = next((n, c.first) for n, c in zip(names, counts, strict=True) if c.missing)
    what = f"{missing} of {missing + documents} documents cannot be read, the first in {name}"
    if missing > max(10, (missing + documents) // 100):
        raise UserError(f"{what}: {first}", "Is it the column? column=... names another one.")
    warn("%s: %s; they are left out", what, first)
