"""What each machine is asked before a job: ``python -m spartito.launch.hosts.facts``."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from spartito.errors import UserError
from spartito.launch.processes.gpus import count_gpus
from spartito.launch.target import check_program
from spartito.system.capacity import available_cores
from spartito.wire.interfaces import addresses_of

MARK = "spartito-facts "
"""How the line of the facts begins: a machine's login may print something of its own before."""


@dataclass(frozen=True, slots=True)
class Question:
    """What to look for: the script (or module) to run, and names to look up."""

    program: str
    module: bool
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """What one machine says of itself; ``missing`` is why the program is not there, or empty."""

    spartito: str
    python: str
    torch: str
    cores: int
    gpus: int
    missing: str
    names: dict[str, list[str]]


def facts(question: Question) -> Facts:
    """What this machine says of itself."""
    try:
        check_program([question.program], question.module)
        missing = ""
    except UserError as error:
        missing = str(error)
    return Facts(
        spartito=version("spartito"),
        python=platform.python_version(),
        torch=_version("torch"),
        cores=available_cores(),
        gpus=count_gpus(os.environ),
        missing=missing,
        names={name: addresses_of(name) for name in question.names},
    )


def ask(question: Question) -> list[str]:
    """The words after ``python`` by which another machine prints its facts."""
    return ["-m", "spartito.launch.hosts.facts", json.dumps(asdict(question))]


def parse(printed: str) -> Facts | None:
    """The facts in what another machine printed; None where there are none."""
    for line in printed.splitlines():
        if line.startswith(MARK):
            return Facts(**json.loads(line.removeprefix(MARK)))
    return None


def main(argv: Sequence[str]) -> None:
    """Print the facts that the question in ``argv`` asks for."""
    question = json.loads(argv[0])
    names = tuple(question["names"])
    found = facts(Question(question["program"], question["module"], names))
    line = MARK + json.dumps(asdict(found))
    print(f"\n{line}", flush=True)  # what was printed before may have no end


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    main(sys.argv[1:])
