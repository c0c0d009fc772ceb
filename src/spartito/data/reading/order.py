"""Which examples a step gets: pure functions of (seed, epoch, step), whatever reads them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.float64]
DataShard = tuple[int, int]
"""A part of every global batch: its index, and how many there are."""


def permutation(count: int, seed: int, epoch: int) -> Indices:
    """The order of ``count`` examples in one epoch, shape ``(count,)``: all of them, shuffled."""
    # The raw stream is the same in every numpy; that of `Generator.permutation` is not promised.
    keys = np.random.Philox(key=_key(seed, epoch)).random_raw(count)
    return np.argsort(keys, kind="stable")


LIKE = 50
"""Batches whose examples are sorted by length together."""


def by_length(order: Indices, lengths: Lengths, batch_size: int, seed: int, epoch: int) -> Indices:
    """The same examples in an order in which a batch has examples of like length.

    Stretches of `LIKE` batches are sorted each, and then all whole batches are permuted: lengths
    are no course of training. The first batch has the longest example of its stretch.

    Args:
        order: All examples, shuffled, shape ``(examples,)``.
        lengths: Of each example by its index, ``(examples,)``.
        batch_size: Examples in a batch.
        seed: What the order of batches is drawn from.
        epoch: The pass.

    Returns:
        The examples, ``(examples,)``; a last smaller batch stays the last one.
    """
    size = LIKE * batch_size
    stretches = [order[start : start + size] for start in range(0, len(order), size)]
    found = np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in stretches])
    whole = len(found) // batch_size
    turns = permutation(whole, seed, epoch)
    batches = found[: whole * batch_size].reshape(whole, batch_size)[turns]
    return np.concatenate([batches.reshape(-1), found[whole * batch_size :]])


def spread(edges: Indices, live: int, seed: int, epoch: int) -> tuple[Indices, Indices]:
    """The order of examples that lie in blocks, such that few blocks are in use at a time.

    Blocks are permuted. Then each example goes to a position drawn from a stretch of ``live``
    blocks around its own, so a block is begun and ended once, with all of its examples between.

    Args:
        edges: The first example of each block, and the number of all, shape ``(blocks + 1,)``.
        live: Blocks in use at a time; as many as there are permute everything.
        seed: What the order is drawn from.
        epoch: The pass.

    Returns:
        The examples in their order, ``(examples,)``, and the blocks as each is used first.
    """
    rows = np.diff(edges)
    blocks = permutation(len(rows), seed, epoch)
    half = live / 2 if live < len(rows) else len(rows)
    middles = np.arange(len(rows)) + 0.5
    starts = np.maximum(middles - half, 0)  # at both ends stretches are shorter
    lengths = np.minimum(middles + half, len(rows)) - starts
    rows = rows[blocks]
    counter = np.array([0, 0, 1, 0], dtype=np.uint64)  # `permutation` counts in the first word
    raw = np.random.Philox(key=_key(seed, epoch), counter=counter).random_raw(int(edges[-1]))
    drawn = (raw >> np.uint64(11)) * 2.0**-53
    positions = np.repeat(starts, rows) + np.repeat(lengths, rows) * drawn
    ends = np.cumsum(rows)
    examples = np.arange(int(edges[-1])) + np.repeat(edges[blocks] - (ends - rows), rows)
    return examples[np.argsort(positions, kind="stable")], blocks


def shard_rows(size: int, shard: DataShard, least: int = 1) -> range:
    """The offsets in a global batch of ``size`` that the data shard ``shard`` has.

    Contiguous; together they are the batch. The first shards have rows, as many as can have
    ``least`` each, and no two of them differ by more than one; the others get none.
    """
    index, count = shard
    filled = min(count, max(1, size // least))
    start, stop = min(index, filled), min(index + 1, filled)
    return range(size * start // filled, size * stop // filled)


def part_rows(rows: range, part: DataShard, least: int = 1) -> range:
    """The rows of a data shard that one of its parts has, cut as a batch is into data shards."""
    if part[1] == 1:
        return rows
    own = shard_rows(len(rows), part, least)
    return range(rows.start + own.start, rows.start + own.stop)


def group_rows(size: int, index: int, groups: Sequence[Sequence[int]], least: int = 1) -> range:
    """The offsets that data shard ``index`` has where the shards of each group train together.

    The batch is cut among the groups first, by how many shards they have, so what a group sees
    does not depend on how it divides that. The first groups have rows, as many as can have
    ``least`` each.
    """
    own = next(number for number, members in enumerate(groups) if index in members)
    edges = [0, *accumulate(len(members) for members in groups)]
    for filled in range(len(groups), 0, -1):
        cuts = [size * edge // edges[filled] for edge in edges[: filled + 1]]
        if filled == 1 or all(stop - start >= least for start, stop in pairwise(cuts)):
            break
    start, stop = cuts[min(own, filled)], cuts[min(own + 1, filled)]
    position = groups[own].index(index)
    return part_rows(range(start, stop), (position, len(groups[own])), least)


def steps(count: int, batch_size: int, drop_remainder: bool) -> int:
    """How many global batches one pass over ``count`` examples has."""
    return count // batch_size if drop_remainder else -(-count // batch_size)


def example_generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The randomness of one example in one epoch, the same wherever it is read."""
    # The generator counts upwards in the first word: examples differ in the last one.
    counter = np.array([0, 0, 0, index + 1], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=_key(seed, epoch), counter=counter))


def _key(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    return np.array([seed % 2**64, epoch], dtype=np.uint64)
