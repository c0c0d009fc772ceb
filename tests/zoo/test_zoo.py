"""Every architecture of the zoo under every strategy: as in plain torch, or refused by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from tests import skips
from tests.replicas import Replicas
from tests.zoo import cells, page
from tests.zoo.models import ANIMALS

pytestmark = pytest.mark.slow

EXPECTED = page.read()

OF_OPERATIONS = ("mesh 2", "pipeline")
"""What they do depends on what a model computes; most others run whole models."""

IN_TURN = (
    *("one_device", "mirrored", "central_storage", "mesh 2x2", "sharded 3", "local_sgd"),
    "parameter_server",
)
"""One of these for each model in turn, so that each trains models of all kinds."""


NESTED = {
    "mesh zero 1": "t5",
    "mesh zero 3": "whisper",
    "pipeline zero 1": "vit",
    "pipeline zero 3": "llama",
    "pipeline of mesh": "bert",
    "local_sgd of sharded": "gan",
    "local_sgd of mesh": "mixtral",
    "local_sgd of pipeline": "gpt2",
    "servers of sharded": "lstm",
    "servers of mesh": "swin",
}
"""A model for each nesting."""


def given() -> Iterator[Any]:
    """All cells. At every change: those of the strategies that see operations, what is refused,
    one of the others for each model, and each nesting for one.
    """
    for number, name in enumerate(cells.rows()):
        for column in cells.COLUMNS:
            soon = column in (*OF_OPERATIONS, IN_TURN[number % len(IN_TURN)])
            late = not soon and EXPECTED.get((name, column)) == "right"
            if column in cells.NESTED:
                late = NESTED[column] != name
            marks = (pytest.mark.night,) if late else ()
            yield pytest.param(name, column, marks=marks, id=f"{name}-{column}")


@pytest.fixture(scope="module")
def pool() -> Iterator[Replicas]:
    """Processes of their own, where libraries stay in fp64."""
    made = Replicas()
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, str], dict[str, Any]]:
    """What plain torch found, by architecture and what it was asked."""
    return {}


def test_the_page_has_all_cells() -> None:
    assert set(EXPECTED) == {(name, column) for name in cells.rows() for column in cells.COLUMNS}


def test_no_cell_is_wrong_and_most_are_right() -> None:
    assert "wrong" not in EXPECTED.values()
    for columns, most in ((cells.ALONE, 0.85), (cells.NESTED, 0.65)):
        said = [EXPECTED[name, column] for name in cells.rows() for column in columns]
        assert said.count("right") >= most * len(said)


@pytest.mark.parametrize(("name", "column"), [*given()])
def test_numbers_are_those_of_plain_torch(
    pool: Replicas, plain: dict[tuple[str, str], dict[str, Any]], name: str, column: str
) -> None:
    package = ANIMALS[name].package if name in ANIMALS else ""
    if package and importlib.util.find_spec(package) is None:
        skips.skip("dev", f"{package}, which scripts/install dev brings")
    key = name, str(cells.COLUMNS[column].plain)
    if key not in plain:
        plain[key] = cells.expected(pool, name, column)
    found = cells.cell(pool, name, column, plain[key])
    assert not found.error, found.error
    assert found.refused or found.right, f"{found.difference:.1e} in {found.where}: {found.limit}"
    said, expected = page.said_of(found), EXPECTED[name, column]
    assert page.without_numbers(said) == page.without_numbers(expected), (
        "python -m tests.zoo --write docs/explanation/zoo.md"
    )


def test_a_difference_is_seen(pool: Replicas) -> None:
    right = cells.expected(pool, "gan", "one_device")
    right["weights"]["0.3.bias"][1] += 1e-9
    found = cells.cell(pool, "gan", "one_device", right)
    assert not found.right
    assert found.where == "0.3.bias"
