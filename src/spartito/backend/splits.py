"""The parts of an all-to-all: whether what each rank sends is what the others expect."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from spartito.backend.errors import DifferentCallsError
from spartito.collectives.memory.rank_memory import Bytes
from spartito.errors import RefusedCallError


def parts_of(row: Bytes, tensor: Tensor, splits: Sequence[int] | None, ranks: int) -> list[Bytes]:
    """The part of ``row`` for each rank.

    Args:
        row: The bytes of ``tensor``.
        tensor: Is split along its first dimension.
        splits: How many of its rows each rank has; none are equal parts.
        ranks: The number of ranks.

    Raises:
        RefusedCallError: The splits are not those of the tensor.
    """
    length = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if length % ranks:
            raise RefusedCallError(
                f"all_to_all of a tensor whose first dimension is {length} to {ranks} ranks",
                "Make it a multiple of the number of ranks, or give the splits.",
            )
        splits = [length // ranks] * ranks
    if len(splits) != ranks or sum(splits) != length or min(splits) < 0:
        raise RefusedCallError(
            f"splits {list(splits)} of a tensor whose first dimension is {length}",
            f"Give {ranks} numbers, one for each rank, whose sum is that dimension.",
        )
    size = len(row) // length if length else 0
    bounds = np.cumsum([0, *splits]) * size
    return [row[first:last] for first, last in pairwise(bounds)]


def check_splits(sizes: NDArray[np.int64]) -> int:
    """The size of the largest part of an all-to-all.

    Args:
        sizes: Shape ``[ranks, 2, ranks]``: the bytes that each rank sends to each, and those that
            it expects from each.

    Returns:
        Bytes.

    Raises:
        DifferentCallsError: On all ranks alike, where one expects something else than comes.
    """
    sent, expected = sizes[:, 0], sizes[:, 1].T
    wrong = np.argwhere(sent != expected)
    if len(wrong):
        source, target = wrong[0]
        raise DifferentCallsError(
            f"all_to_all: rank {source} of the group sends {sent[source, target]} bytes to rank "
            f"{target}, which expects {expected[source, target]}",
            "The splits of what a rank gets are those that the others send to it.",
        )
    return int(sent.max())
