"""How wide the seam is: what a strategy has to have, and what the trainer asks of it."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import spartito as sp
from spartito import training

MOST = 9
TRAINING = Path(training.__file__).parent


def abstract() -> set[str]:
    return {name for name, value in vars(sp.Strategy).items() if _is_abstract(value)}


def _is_abstract(value: object) -> bool:
    return getattr(value, "__isabstractmethod__", False)


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
    assert len(abstract()) <= MOST, sorted(abstract())
    assert abstract() <= {name for name, _ in inspect.getmembers(sp.Strategy)}
    assert "coordination" in found
