"""Which examples a step gets: pure functions of (seed, epoch, step), whatever reads them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def permutation(count: int, seed: int, epoch: int) -> Indices:
    """The order of ``count`` examples in one epoch, shape ``(count,)``: all of them, shuffled."""
    # The raw stream is the same in every numpy; that of `Generator.permutation` is not promised.
    keys = np.random.Philox(key=_key(seed, epoch)).random_raw(count)
    return np.argsort(keys, kind="stable")


def share(size: int, rank: int, world_size: int, least: int = 1) -> range:
    """The places of a global batch of ``size`` that replica ``rank`` computes.

    Contiguous; together they are the batch. The first replicas take part, as many as can have
    ``least`` rows each, and no two of them differ by more than one; the others get none.
    """
    parties = min(world_size, max(1, size // least))
    part = min(rank, parties), min(rank + 1, parties)
    return range(size * part[0] // parties, size * part[1] // parties)


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
