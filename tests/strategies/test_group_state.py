"""What groups of replicas have between two updates, as one checkpoint has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from spartito.collectives.collective import Collective
from spartito.steps.outer_loops.group_state import accumulated_by_all
from tests.collectives.group import run


def accumulated(world: Collective) -> dict[str, Any]:
    """The tasks of rank 0 and 2 speak for their groups."""
    model, rank = nn.Linear(2, 1), world.rank
    pair = SimpleNamespace(model=model, gradients=SimpleNamespace(parameters=[*model.parameters()]))
    waits = {"weight": torch.full((1, 2), rank + 1.0)}
    own = {"gradients": waits, "weight": 3.0 + rank, "loss": 2.0, "passes": 4}
    return accumulated_by_all(cast(Any, pair), own, world, counts=rank != 1)


def test_what_waits_in_all_groups_is_added_up_once_for_each() -> None:
    for found in run(accumulated, 3):
        assert {name: each.tolist() for name, each in found.pop("gradients").items()} == {
            "weight": [[4.0, 4.0]]
        }
        assert found == {"weight": 8.0, "loss": 4.0, "passes": 4}
