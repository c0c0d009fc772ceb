"""Where the cut of a tensor goes when it gets another shape."""

from __future__ import annotations

import pytest

from spartito.mesh.rules.views import reshaped
from spartito.mesh.spec import replicated, spec

SIZES = (("model", 2),)


@pytest.mark.parametrize(
    ("blocks", "target", "cut"),
    [
        ((6, 6, 6), (3, 6, 2), True),  # query, key and value, packed into one
        ((6, 6, 6), (2, 9, 2), False),  # not as many as blocks
        ((4, 4, 10), (3, 6, 2), False),  # of different sizes: a row of the result is none of them
        ((6, 6, 6), (3, 12), False),  # with elements of another dim
    ],
)
def test_packed_blocks_become_a_dim_of_their_own(
    blocks: tuple[int, ...], target: tuple[int, ...], cut: bool
) -> None:
    before = spec(("model", None), (), (blocks, ()))
    kept, after, local = reshaped(before, (18, 2), target, SIZES)
    if cut:
        assert (kept, after, local) == (before, spec((None, "model", None)), (3, 3, 2))
    else:
        assert (kept, after, local) == (replicated(2), replicated(len(target)), target)
