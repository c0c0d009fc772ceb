from __future__ import annotations

from math import inf

import pytest
import torch

from spartito.collectives.shared_memory import has_room

PLAIN = [[1, 7], [1, 7]]  # the same cores, the same quota
CONTAINERS = [[1, 7], [1, 8]]
PINNED = [[1, 7], [2, 7]]


@pytest.mark.parametrize(
    ("ranks", "cores", "quota", "room"),
    [
        (PLAIN, 2, inf, True),
        (PLAIN, 1, inf, False),
        (PLAIN, 2, 1.0, False),
        (CONTAINERS, 2, 1.0, True),
        (CONTAINERS, 2, 0.5, False),
        (CONTAINERS, 1, 1.0, False),
        (PINNED, 1, inf, True),
    ],
)
def test_a_rank_spins_only_where_all_can_compute(
    ranks: list[list[int]], cores: int, quota: float, room: bool
) -> None:
    everyone = torch.tensor(ranks)
    assert has_room(everyone[0], everyone, cores, quota) is room
