"""The pages about strategies say what the table of strategies and the classes say."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterator
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest

import spartito as sp
from spartito.registry import BUILT_IN, OF_THE_JOB

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "reference" / "strategies"
INDEX = PAGES / "index.md"
NAMES = list(BUILT_IN)
MOST_WORDS = 80
"""Before the first command of a strategy's page."""
SIZES = {"KiB": 2**10, "MiB": 2**20}


def rows(text: str) -> Iterator[list[str]]:
    """The cells of all rows of all tables, without heads and the lines below them."""
    table = re.compile(r"^\|.*\|$\n^\|[-| ]+\|$\n((?:^\|.*\|$\n?)*)", re.M)
    for found in table.finditer(text):
        for line in found[1].splitlines():
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def named(text: str) -> list[str]:
    """The strategies that the first cells of a text's rows name, in order."""
    first = [re.match(r"\[?`(\w+)`", cells[0]) for cells in rows(text)]
    return [found[1] for found in first if found and found[1] in BUILT_IN]


def section(text: str, title: str) -> str:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text()


def options(name: str) -> dict[str, object]:
    """The options of a strategy's own, with their defaults: what not every strategy has so."""
    of_all = {one.name: one.default for one in fields(sp.Strategy)}
    found = signature(BUILT_IN[name].load()).parameters.values()
    return {
        one.name: one.default
        for one in found
        if one.name not in of_all or one.default != of_all[one.name]
    }


def documented(text: str) -> dict[str, str]:
    """The options of a text's table, with what stands as their default."""
    table = [(re.findall(r"`(\w+)`", cells[0]), cells[1]) for cells in rows(text)]
    shown = [(names, default.split(", ")) for names, default in table]
    return {
        name: defaults[index] if len(defaults) == len(names) else defaults[0]
        for names, defaults in shown
        for index, name in enumerate(names)
    }


def value(text: str) -> object:
    """The value that a default's cell writes; the cell itself where it is prose."""
    number, _, size = text.partition(" ")
    if size in SIZES:
        return int(number) * SIZES[size]
    try:
        return literal_eval(text.strip("`"))
    except (SyntaxError, ValueError):
        return text


@pytest.mark.parametrize("name", NAMES)
def test_few_words_come_before_the_command(name: str) -> None:
    head, fence, _ = page(name).partition("```")
    assert fence, "no command"
    assert len(head.split()) <= MOST_WORDS


@pytest.mark.parametrize("name", NAMES)
def test_the_table_of_options_names_those_of_the_class(name: str) -> None:
    text = documented(section(page(name), "Options"))
    assert sorted(text) == sorted(options(name))
    for option, default in options(name).items():
        said = value(text[option])
        assert said == default or (isinstance(said, str) and "`" not in said), f"{option}: {said!r}"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_which_options_of_every_strategy_it_lacks(name: str) -> None:
    (line,) = re.findall(r"\(index\.md#options-of-every-strategy\)(.*)", page(name))
    own = set(options(name))
    lacks = set(OF_THE_JOB) - set(BUILT_IN[name].options or ()) - own
    said = re.match(r", except (.*?)\.", line)
    assert set(re.findall(r"`(\w+)`", said[1] if said else "")) == lacks


def test_the_options_of_every_strategy() -> None:
    text = section(INDEX.read_text(), "Options of every strategy")
    assert sorted(documented(text)) == sorted(("cluster", *OF_THE_JOB))


@pytest.mark.parametrize(
    "path", ["README.md", "docs/reference/strategies/index.md", "docs/explanation/concepts.md"]
)
def test_tables_name_exactly_the_strategies(path: str) -> None:
    text = (ROOT / path).read_text()
    table = section(text, "Strategy and API") if path.endswith("concepts.md") else text
    assert named(table) == NAMES


def test_the_table_of_devices_has_all_of_them() -> None:
    text = (ROOT / "docs" / "guides" / "devices.md").read_text()
    assert sorted(named(section(text, "What was run"))) == sorted(NAMES)


def test_the_reference_and_the_menu_have_all_of_them() -> None:
    classes = [info.implementation.partition(":")[2] for info in BUILT_IN.values()]
    reference = (ROOT / "docs" / "reference" / "api" / "strategies.md").read_text()
    found = re.findall(r"^::: spartito\.(\w+Strategy)$", reference, re.M)
    assert found == classes
    menu = (ROOT / "mkdocs.yml").read_text()
    shown = re.findall(r"^ +- (\w+): reference/strategies/\1\.md$", menu, re.M)
    assert [name for name in shown if name in NAMES] == NAMES


def test_the_index_says_what_the_table_of_strategies_says() -> None:
    of_index = {cells[0]: cells for cells in rows(INDEX.read_text().partition("\n## ")[0])}
    for name, info in BUILT_IN.items():
        _, replicas, update, _ = of_index[f"[`{name}`]({name}.md)"]
        assert ("on servers" in update) == info.needs_servers == info.asynchronous
        assert ("of one machine" in replicas) == (info.one_machine and info.most_replicas != 1)
        assert (replicas == "one") == (info.most_replicas == 1)
        assert ("any machines" in replicas) <= (not info.one_machine)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_whether_its_jobs_recover(name: str) -> None:
    text = section(page(name), "Limits")
    if BUILT_IN[name].recovers:
        assert "`--recover" in text
        assert "`--recover` is refused" not in text
    else:
        assert "`--recover` is refused" in text or "`--recover" not in text


def test_every_strategy_that_recovers_is_in_the_table_of_limits() -> None:
    text = (ROOT / "docs" / "explanation" / "limits.md").read_text()
    line = next(line for line in text.splitlines() if "--recover`](" in line and "go on" in line)
    synchronous = {
        name for name, info in BUILT_IN.items() if info.recovers and not info.needs_servers
    }
    assert set(re.findall(r"`(\w+)`", line)) == synchronous
