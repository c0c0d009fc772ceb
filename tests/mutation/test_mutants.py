"""The tool that changes the sources: what it changes, what it leaves, and what it says."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.mutation.__main__ import EXPLAINED, SOURCES, explained, folders_of, verdict
from tests.mutation.mutants import Mutant, mutants, of_source, sample
from tests.mutation.trees import ROOT, Map, tree

SOURCE = '''
"""Words: 1 < 2."""
LIMIT = 3

class Cell:
    """A cell."""

    size: int = 1

    def fits(self, other: "list[1]") -> bool:
        """Whether 1 < 2."""
        log.info("%d", 1 + 2)
        if other:
            raise ValueError(f"{other!r}: {1 + 2}")
        self.tell()
        return self.size < 4 and not other

def outer(é, b):
    def inner():
        return é is b
    return inner
'''


@pytest.fixture
def found(tmp_path: Path) -> list[Mutant]:
    file = tmp_path / "cell.py"
    file.write_text(SOURCE)
    return of_source("cell.py", file)


def test_what_is_changed_and_what_is_not(found: list[Mutant]) -> None:
    assert sorted(one.key for one in found) == [
        "cell.py: Cell.fits: 4 -> 5",
        "cell.py: Cell.fits: not other -> (other)",
        "cell.py: Cell.fits: other -> (not other)",
        "cell.py: Cell.fits: raise ValueError -> pass",
        "cell.py: Cell.fits: self.size < 4 -> (self.size <= 4)",
        "cell.py: Cell.fits: self.size < 4 and (not other) -> (self.size < 4 or not other)",
        "cell.py: Cell.fits: self.tell() -> pass",
        "cell.py: outer.<locals>.inner: é is b -> (é is not b)",
    ]


def test_a_mutant_is_one_change_of_the_file(found: list[Mutant]) -> None:
    by_key = {one.key: one for one in found}
    mutant = by_key["cell.py: outer.<locals>.inner: é is b -> (é is not b)"]
    assert mutant.apply(SOURCE.encode()).decode() == SOURCE.replace("é is b", "(é is not b)")


def test_a_sample_is_the_same_for_a_seed_and_stays_when_others_come(
    found: list[Mutant], tmp_path: Path
) -> None:
    some = partial(sample, tmp_path)
    assert some(found, 3, seed=1) == some(found[::-1], 3, seed=1)
    assert some(found, 8, seed=1) != some(found, 8, seed=2)
    without = some(found[1:], 4, seed=1)
    assert len({*without} & {*some(found, 4, seed=1)}) >= 3
    broken = replace(found[0], after="(")
    assert broken not in some([broken, *found], 9, seed=1)


@pytest.mark.slow
def test_equal_changes_of_one_function_have_names_of_their_own() -> None:
    keys = [one.key for one in mutants(ROOT / "src" / "spartito", ["engine"])]
    assert len(keys) > 100
    assert len(set(keys)) == len(keys)


@pytest.mark.slow
def test_reasons_are_of_mutants_that_there_are() -> None:
    reasons = explained(EXPLAINED.read_text())
    files = sorted({key.partition(":")[0] for key in reasons})
    keys = {one.key for file in files for one in of_source(file, SOURCES / file)}
    assert reasons.keys() <= keys


def test_what_survives_has_a_reason_and_what_has_a_reason_survives() -> None:
    reasons = explained("# Title\n\n* `a: f: 1 -> 2`: takes longer, nothing else\n* `b`: same\n")
    assert reasons == {"a: f: 1 -> 2": "takes longer, nothing else", "b": "same"}
    killed = [(f"k{number}", "killed") for number in range(18)]
    known = ["a: f: 1 -> 2", "b", "c"]
    assert verdict([*killed, ("b", "survived"), ("a: f: 1 -> 2", "untested")], reasons, known) == []
    assert verdict([*killed, ("c", "survived")], reasons, known) == [
        "survived, without a reason: c"
    ]
    assert verdict([*killed, ("b", "timeout")], reasons, known) == [
        "killed, though there is a reason why not: b"
    ]
    assert verdict(killed, reasons, ["b", "c"]) == ["a reason for what is no mutant: a: f: 1 -> 2"]


MADE = "def twice(x: int) -> int:\n    return x * 2\n"
TEST = """
from spartito import made

def test_in_a_replica(replicas):
    assert replicas(made.twice, 1, 3) == [6]

def test_elsewhere():
    pass
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # three runs of pytest, which compile all modules
def test_a_mutant_acts_in_a_copy_and_in_the_children_of_its_tests() -> None:
    with tree() as copied:
        file = copied.folder / "src" / "spartito" / "made.py"
        file.write_text(MADE)
        (copied.folder / "tests" / "test_made.py").write_text(TEST)
        (mutant, *_) = (one for one in mutants(file.parent, ["."]) if one.path == "made.py")
        recorded = copied.record(["tests/test_made.py"], 1, [mutant])
        assert recorded.failed == []
        assert recorded.reached == {mutant.key: ["tests/test_made.py::test_in_a_replica"]}
        tests = recorded.tests_of(mutant, 60)
        assert tests == ["tests/test_made.py::test_in_a_replica"]
        outcome, failure = copied.run(mutant, dict.fromkeys(tests, 20.0))
        assert outcome == "killed"
        assert failure.startswith(tests[0])
        assert file.read_text() == MADE
        harmless = replace(mutant, after="x + x")
        assert copied.run(harmless, dict.fromkeys(tests, 20.0)) == ("survived", "")
        endless = replace(mutant, after="[y for y in iter(int, 1)][0]")
        assert copied.run(endless, dict.fromkeys(tests, -6.0))[0] == "timeout"
    assert not (ROOT / "src" / "spartito" / "made.py").exists()


def test_a_map_grows_by_what_is_recorded(tmp_path: Path) -> None:
    one = Map({"a.py: f": ["x"], "b.py: g": ["x"]}, {"x": 1.0}, ["x"], {"key": ["x"]}, ["first"])
    both = one | Map({"a.py: f": ["y"]}, {"y": 2.0}, [], {"key": ["y"]}, ["second"])
    both.save(tmp_path / "map.json")
    assert Map.load(tmp_path / "map.json") == Map(
        {"a.py: f": ["x", "y"], "b.py: g": ["x"]},
        {"x": 1.0, "y": 2.0},
        ["x"],
        {"key": ["x", "y"]},
        ["first", "second"],
    )


def test_tests_are_recorded_by_folder() -> None:
    *folders, files = folders_of(["tests"])
    assert ["tests/mesh"] in folders
    assert "tests/test_folders.py" in files
    assert folders_of(["tests/mesh", "tests/test_folders.py"]) == [
        ["tests/mesh"],
        ["tests/test_folders.py"],
    ]


def test_tests_that_come_to_the_lines_are_run_and_those_of_the_package_come_first() -> None:
    mutant = Mutant("mesh/a.py", "f", (0, 1), "1", "2")
    seconds = {"tests/ps/x": 1.0, "tests/mesh/y": 2.0, "tests/ps/z": 0.5}
    tests = Map({"mesh/a.py: f": [*seconds]}, seconds, [])
    assert tests.tests_of(mutant, 60) == ["tests/ps/z", "tests/mesh/y", "tests/ps/x"]
    found = replace(tests, reached={mutant.key: ["tests/ps/x"]})
    assert found.tests_of(mutant, 60) == ["tests/ps/x"]


def test_the_lines_of_a_mutant(found: list[Mutant]) -> None:
    by_key = {one.key: one.lines(SOURCE.encode()) for one in found}
    assert by_key["cell.py: Cell.fits: 4 -> 5"] == (16, 16)
    assert by_key["cell.py: Cell.fits: raise ValueError -> pass"] == (14, 14)


def test_the_quickest_tests_come_first_up_to_the_budget() -> None:
    mutant = Mutant("a.py", "f", (0, 1), "1", "2")
    seconds = {"slow": 30.0, "quick": 0.1, "fails": 0.1, "middle": 5.0}
    tests = Map({"a.py: f": [*seconds]}, seconds, ["fails"])
    assert tests.tests_of(mutant, 60) == ["quick", "middle", "slow"]
    assert tests.tests_of(mutant, 10) == ["quick", "middle"]
    assert tests.tests_of(mutant, 0.01) == ["quick"]
    assert Map({}, {}, []).tests_of(mutant, 60) == []
