"""How wide the seam is: what a strategy has to have, and what the trainer asks of it."""

from __future__ import annotations

import ast
import inspect
import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import spartito as sp
from spartito import training
from spartito.steps.coordination import Account, Agreement
from spartito.steps.parts import Exchange, Held, Placement
from spartito.steps.placements.computation import Computation, Division
from spartito.steps.recovery import Copies, Recovering
from spartito.steps.step import Step
from spartito.steps.topology import Topology
from spartito.strategies import strategy_class
from spartito.wire.ports import free_port
from tests.collectives.group import spec

MOST, SMALL = 12, 6
TRAINING = Path(training.__file__).parent


SEAMS = (
    *(Account, Agreement, Computation, Copies, Division, Exchange, Held, Placement),
    *(Recovering, Topology),
)
"""What parts are to each other."""


def methods(seam: type) -> list[str]:
    """Those of its own, without what it is made of."""
    found = vars(seam).items()
    return [name for name, each in found if inspect.isfunction(each) and name[0] != "_"]


def used(source: str) -> set[str]:
    """The attributes that a module takes of anything called ``strategy`` or ``_strategy``."""

    def is_strategy(node: ast.expr) -> bool:
        name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
        return name in ("strategy", "_strategy")

    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and is_strategy(node.value)
    }


def test_what_is_taken_of_a_strategy_is_found() -> None:
    text = "trainer.strategy.a; self._strategy.b(); strategy.c; strategy = x; self.strategies.d"
    assert used(text) == {"a", "b", "c"}


def test_the_seam_does_not_grow() -> None:
    """A strategy is what it computes; who decides and who hears of it is its coordination."""
    found = set().union(*(used(file.read_text()) for file in TRAINING.rglob("*.py")))
    assert len(found) <= MOST, sorted(found)
    assert "coordination" in found


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.__name__)
def test_a_part_is_small(seam: type) -> None:
    """Who writes one has to know little of a step."""
    assert 1 <= len(methods(seam)) <= SMALL, methods(seam)


def test_there_is_one_step() -> None:
    """But for workers that never meet, whose servers make the update."""
    assert [kind.__name__ for kind in Step.__subclasses__()] in ([], ["ServedStep"])


def sockets() -> set[str]:
    """The sockets that this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {name for name in found if name.startswith("socket:")}


@pytest.mark.parametrize("name", ["mirrored", "central_storage", "multi_worker_mirrored"])
def test_building_a_strategy_connects_to_nobody(name: str) -> None:
    """Rank 0 of two, of which the other one never comes."""
    before, environment, threads = sockets(), dict(os.environ), torch.get_num_threads()
    port = free_port()
    try:
        with strategy_class(name)(cluster=spec(0, 2, port)) as strategy:
            assert strategy.data_shard == (0, 2)
            assert sockets() == before
    finally:
        torch.set_num_threads(threads)
    assert dict(os.environ) == environment


def test_a_strategy_closes_with_its_block() -> None:
    closed = []

    class Own(sp.OneDeviceStrategy):
        def close(self) -> None:
            closed.append(self)
            super().close()

    with pytest.raises(ZeroDivisionError), Own(cluster=sp.ClusterSpec.alone()) as strategy:
        raise ZeroDivisionError
    assert closed == [strategy]
