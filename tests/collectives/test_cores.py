from __future__ import annotations

from math import inf

import pytest

from spartito.collectives.memory.shared_memory import Cores

TWO = Cores((0, 1), "a")


@pytest.mark.parametrize(
    ("ranks", "quota", "enough"),
    [
        ([TWO, TWO], inf, True),
        ([Cores((0,), "a"), Cores((0,), "a")], inf, False),
        ([TWO, TWO], 1.0, False),
        ([TWO, Cores((0, 1), "b")], 1.0, True),
        ([TWO, Cores((0, 1), "b")], 0.5, False),
        ([Cores((0,), "a"), Cores((0,), "b")], 1.0, False),
        ([Cores((0,), "a"), Cores((1,), "a")], inf, True),
    ],
)
def test_a_rank_spins_only_where_all_can_compute(
    ranks: list[Cores], quota: float, enough: bool
) -> None:
    assert ranks[0].suffice(ranks, quota) is enough
