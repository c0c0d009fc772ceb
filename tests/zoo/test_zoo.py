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
    right = [said for said in EXPECTED.values() if said == "right"]
    assert "wrong" not in EXPECTED.values()
    assert len(right) >= 0.85 * len(EXPECTED)


@pytest.mark.parametrize("column", cells.COLUMNS)
@pytest.mark.parametrize("name", cells.rows())
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
    assert found.refused or found.right, f"{found.difference:.1e} in {found.where}"
    assert page.said_of(found) == EXPECTED[name, column], (
        "python -m tests.zoo --write docs/explanation/zoo.md"
    )


def test_a_difference_is_seen(pool: Replicas) -> None:
    right = cells.expected(pool, "gan", "one_device")
    right["weights"]["0.3.bias"][1] += 1e-9
    found = cells.cell(pool, "gan", "one_device", right)
    assert not found.right
    assert found.where == "0.3.bias"
