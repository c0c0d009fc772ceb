"""What ``--help`` says: a few options first, the others under headings, an example at the end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from spartito.cli import main
from spartito.cli.app import application
from spartito.cli.command import PAGE
from spartito.cli.commands import COMMANDS
from spartito.cli.strategies import options_of
from spartito.launch.job import Heading
from spartito.registry import BUILT_IN, strategy_names

MOST = 8
"""Options that a reader meets before the first heading."""


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command with options of its own, by the words that are typed."""
    command = command or typer.main.get_command(application([]))
    for name, part in getattr(command, "commands", {}).items():
        yield from commands(part, (*path, name))
    if not hasattr(command, "commands"):
        yield " ".join(path), command


ALL = dict(commands())


def sections(text: str) -> dict[str, list[str]]:
    """The options of a help by their heading, as far as a row begins with one."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in text.splitlines():
        if match := re.fullmatch(r"(\w[\w ]*):", line):
            heading = match[1]
        elif heading not in ("", "Arguments") and (
            row := re.match(r"  (-[\w-]+)(, --?[\w-]+)*", line)
        ):
            found.setdefault(heading, []).append(max(row[0].split(), key=len).rstrip(","))
    return found


@pytest.mark.parametrize("words", ALL)
def test_few_options_come_first_and_each_stands_once(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words.split(), "--help"]) == 0
    text = capsys.readouterr().out
    found = sections(text)
    assert 1 <= len(found["Options"]) <= MOST
    known = [
        max(option.opts, key=len)
        for option in ALL[words].params
        if option.param_type_name == "option"
    ]
    assert sorted(each for options in found.values() for each in options) == sorted(
        [*known, "--help"]
    )
    headings = [each for each in found if each in list(Heading)]
    assert headings == [each for each in Heading if each in headings]  # in one order everywhere
    assert "<" not in text  # a type of Python's is no word for a value
    example, _, page = text.rstrip().splitlines()[-3:]
    assert example.startswith(f"Example: spartito {words}")
    assert page == PAGE


@pytest.mark.parametrize("words", ["run", "train", "compare"])
def test_defaults_are_shown(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([*words.split(), "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for option in ALL[words].params:
        if option.param_type_name == "option" and option.default not in (None, False, (), []):
            assert f"[default: {option.default}]" in text, option.name


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_of_all_lists_every_command(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    out = capsys.readouterr().out
    listed = out.partition("Commands:")[2]
    assert re.findall(r"^  (\w+) +\S.*$", listed, re.MULTILINE) == list(COMMANDS)
    assert "..." not in listed  # each says in its line what it is


@pytest.mark.parametrize("words", [["help", "data"], ["data"]])
def test_a_command_of_commands_shows_its_help(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    assert "spartito data [OPTIONS] COMMAND" in capsys.readouterr().out


def test_the_strategies_and_what_each_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies"]) == 0
    head, *rows = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert re.split(r"  +", head) == ["strategy", "what it does", "needs"]
    found = {name: needs for name, _, needs in (re.split(r"  +", row) for row in rows)}
    assert tuple(found) == strategy_names()
    assert found["parameter_server"] == "parameter servers (--ps)"
    assert found["central_storage"] == "one machine, shared memory"


def test_the_options_of_a_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies", "local_sgd(every=5)"]) == 0  # as it stands in a command
    out = " ".join(capsys.readouterr().out.split())
    assert "every=20 How many updates a group makes from one meeting to the next" in out
    assert main(["strategies", "local_sgd", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["options"]["every"]["default"] == "20"


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_option_of_a_strategy_says_what_it_is(name: str) -> None:
    silent = [option for option, _, about in options_of(BUILT_IN[name]) if not about]
    assert silent == []
    assert BUILT_IN[name].about
