"""What tests cost in seconds of a core, and which of them are too dear for the quick suite.

``pytest --costs-to FILE`` writes what each test took, with all processes that it started, and
``python -m tests.costs FILE`` makes the list of the dear ones anew. Write the file on a machine
that does nothing else, as processes that share a core count more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil

LIST = Path(__file__).with_name("dear.txt")
LIMIT = 0.4
"""Seconds of a core from which on a test is a dear one."""

ONE_OF_EACH = (
    "backend/test_failures.py",
    "collectives/test_failures.py",
    "doctor/test_examination.py",
    "mesh/test_rules.py",
    "pipeline/test_strategy.py",
    "planning/test_plan.py",
    "strategies/test_checkpoints.py",
    "strategies/test_compression.py",
    "strategies/test_divided_recovery.py",
    "strategies/test_nestings.py",
    "strategies/test_parameter_server_faults.py",
    "strategies/test_recovery.py",
    "test_docs.py",
    "test_failing_jobs_integration.py",
    "test_jobs_integration.py",
)
"""Files of which at least the cheapest test runs in the quick suite."""

ALWAYS = ("cluster/test_no_pickle.py", "test_docstrings.py", "test_public.py", "test_words.py")
"""Files that look at all sources: whoever changes any wants to hear of it at once."""


def is_dear(nodeid: str) -> bool:
    """Whether a test is too dear for the quick suite.

    Args:
        nodeid: As pytest has it.
    """
    name = nodeid.removeprefix("tests/")
    return not _dear().isdisjoint((name, function_of(name)))


def function_of(name: str) -> str:
    """A test without what is special to one of its forms.

    Args:
        name: As pytest has it, without the folder of the tests.
    """
    return name.partition("[")[0]


@cache
def _dear() -> frozenset[str]:
    return frozenset(LIST.read_text().splitlines())


@contextmanager
def counted(nodeid: str, file: Path) -> Iterator[None]:
    """Append what a test costs to a file.

    Args:
        nodeid: The test.
        file: What gets a line of JSON, with the test and its seconds.
    """
    before = _seconds()
    yield
    with file.open("a") as lines:
        lines.write(json.dumps([nodeid, round(_seconds() - before, 3)]) + "\n")


def _seconds() -> float:
    """What this process and all that it started have taken of all cores."""
    me, total = psutil.Process(), 0.0
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # its parent has counted it
            total += sum(process.cpu_times()[:4])  # with those of its children that have ended
    return total


def dear_of(costs: Iterable[tuple[str, float]]) -> list[str]:
    """The names of the dear ones among tests, as `LIST` has them.

    Args:
        costs: Tests, as pytest has them, and their seconds.

    Returns:
        Functions all forms of which are dear, and forms of others.
    """
    seconds = {nodeid.removeprefix("tests/"): cost for nodeid, cost in costs}
    dear = {name for name, cost in seconds.items() if cost >= LIMIT and not name.startswith(ALWAYS)}
    for file in ONE_OF_EACH:
        of_file = [name for name in seconds if name.startswith(f"{file}::")]
        dear -= set(sorted(of_file, key=seconds.__getitem__)[:1])
    cheap = {function_of(name) for name in seconds.keys() - dear}
    return sorted({n if function_of(n) in cheap else function_of(n) for n in dear})


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text().splitlines()
    LIST.write_text("".join(f"{name}\n" for name in dear_of(map(json.loads, lines))))
