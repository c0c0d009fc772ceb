"""Copies of the sources that mutants live in; the checkout itself is never changed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.mutants import Mutant

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "runs", "__pycache__", "*.egg-info")
MARK = "SPARTITO_TEST_MUTANT"
PART = "PYTEST_PART"
"""The variable that says which part of the tests a recorder sees."""

MORE, SPARE = 3.0, 20.0
"""Under a mutant a test, and a run, may take so many times its usual time, and so many seconds."""

PATIENCE = (1, 4)
"""A run that does not end in its time is repeated, with so many times as much."""

ELSEWHERE = 3.0
"""Tests of the mutant's own package come before others that are quicker by less than this."""

BROKEN_BY_MUTANTS = ("INTERNALERROR", "ImportError while loading conftest")
"""What pytest says where what it needs itself, as free ports, is changed."""

OPTIONS = (
    *("-q", "-p", "no:cacheprovider", "-p", "tests.mutation.plugin"),
    *("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"),
    *("-m", "not docker and not slurm and not slow and not night"),
)


@dataclass(frozen=True, slots=True)
class Map:
    """Which tests enter a function, how long each takes, and which of them failed.

    Attributes:
        entered: By "path: function", the tests that enter it.
        seconds: Of each test.
        failed: Those that fail without a mutant too.
        reached: By the key of a mutant, the tests that come to its lines.
        targets: What was recorded.
    """

    entered: dict[str, list[str]]
    seconds: dict[str, float]
    failed: list[str]
    reached: dict[str, list[str]] = field(default_factory=dict)
    targets: list[str] = field(default_factory=list)

    def save(self, file: Path) -> None:
        tests = [*self.seconds]
        number = {test: index for index, test in enumerate(tests)}
        found = [
            {name: [number[x] for x in those] for name, those in each.items()}
            for each in (self.entered, self.reached)
        ]
        seconds = [round(self.seconds[test], 3) for test in tests]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps([tests, seconds, *found, self.failed, self.targets]))

    @classmethod
    def load(cls, file: Path) -> Map:
        tests, seconds, *found, failed, targets = json.loads(file.read_text())
        entered, reached = (
            {name: [tests[index] for index in those] for name, those in each.items()}
            for each in found
        )
        return cls(entered, dict(zip(tests, seconds, strict=True)), failed, reached, targets)

    def __or__(self, other: Map) -> Map:
        """What either of them knows, of different tests."""

        def joined(some: Mapping[str, list[str]], more: Mapping[str, list[str]]) -> Any:
            return {key: [*some.get(key, ()), *more.get(key, ())] for key in {**some, **more}}

        return Map(
            joined(self.entered, other.entered),
            self.seconds | other.seconds,
            [*self.failed, *other.failed],
            joined(self.reached, other.reached),
            [*self.targets, *other.targets],
        )

    def tests_of(self, mutant: Mutant, budget: float) -> list[str]:
        """The tests that may notice a mutant, up to ``budget`` s.

        Those that come to its lines, else those that enter its function: those of its own package
        first, and quick ones before others.
        """
        name = f"{mutant.path}: {mutant.function}"
        found = self.reached.get(mutant.key) or self.entered.get(name, [])
        own = f"tests/{mutant.path.partition('/')[0]}/"

        def cost(test: str) -> tuple[float, str]:
            return self.seconds[test] * (1.0 if test.startswith(own) else ELSEWHERE), test

        chosen: list[str] = []
        total = 0.0
        for test in sorted({*found} - {*self.failed}, key=cost):
            total += self.seconds[test]
            if total > budget and chosen:
                break
            chosen.append(test)
        return chosen


class Tree:
    """A copy of the sources in ``folder``, which all processes of its tests import."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tree"
        shutil.copytree(ROOT, self.folder, ignore=LEFT_OUT, symlinks=True)
        self._server: subprocess.Popen[str] | None = None
        self._mark = secrets.token_hex(8)

    def record(
        self,
        targets: Sequence[str],
        processes: int,
        chosen: Iterable[Mutant] = (),
        forms: int | None = None,
    ) -> Map:
        """Run the tests ``targets`` without a mutant, by so many processes of pytest.

        Which of them come to the lines of the ``chosen`` mutants is recorded too. Of tests with
        parameters so many ``forms`` run, if not all.
        """
        folder = self.folder / "entered"
        folder.mkdir()
        numbered = [*chosen]
        (folder / "chosen").write_text(json.dumps(self._lines(numbered)))
        files = [file for target in targets for file in self._files(target)]
        parts = {str(n): files[n::processes] for n in range(processes) if files[n::processes]}
        for part in parts:
            (folder / f"current-{part}").write_bytes(bytes(4))
            (folder / f"entered-{part}").touch()
        source = self.folder / "src"
        shutil.copy(Path(__file__).with_name("recorder.py"), source / "recorder.py")
        init = source / "spartito" / "__init__.py"
        recording = init.read_bytes() + b"\nimport recorder\n"
        with _changed(init, recording), ThreadPoolExecutor(processes) as pool:
            for part, its in parts.items():
                some = [] if forms is None else [f"--forms={forms}"]
                pool.submit(self._pytest, [f"--entered={folder}", *some, *its], {PART: part})
        entered: defaultdict[str, set[str]] = defaultdict(set)
        reached: defaultdict[str, set[str]] = defaultdict(set)
        seconds: defaultdict[str, float] = defaultdict(float)
        failed = set()
        for file in folder.glob("tests-*"):
            names = {}
            for line in file.read_text().splitlines():
                number, test, duration, passed = json.loads(line)
                names[number] = test
                seconds[test] += duration
                if not passed:
                    failed.add(test)
            for line in (folder / f"entered-{file.name[6:]}").read_text().splitlines():
                number, path, what = line.split(" ", 2)
                if int(number) in names and path == "@":
                    reached[numbered[int(what)].key].add(names[int(number)])
                elif int(number) in names:
                    entered[f"{path}: {what}"].add(names[int(number)])
        shutil.rmtree(folder)
        found = ({k: sorted(v) for k, v in each.items()} for each in (entered, reached))
        return Map(next(found), dict(seconds), sorted(failed), next(found), [*targets])

    def _lines(self, chosen: Sequence[Mutant]) -> dict[str, list[tuple[int, int, int]]]:
        """By "path function", the lines of each mutant, and its number."""
        found: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for number, mutant in enumerate(chosen):
            source = (self.folder / "src" / "spartito" / mutant.path).read_bytes()
            found[f"{mutant.path} {mutant.function}"].append((*mutant.lines(source), number))
        return found

    def _files(self, target: str) -> list[str]:
        """The files with tests of a folder, or ``target`` itself."""
        found = sorted((self.folder / target).rglob("test_*.py"))
        return [str(file.relative_to(self.folder)) for file in found] or [target]

    def run(self, mutant: Mutant, tests: Mapping[str, float]) -> tuple[str, str]:
        """Run tests, which usually take so many seconds, with the mutant.

        Returns "killed", "timeout" or "survived", and what failed.
        """
        file = self.folder / "src" / "spartito" / mutant.path
        chosen = self.folder / "chosen"
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        words = ["-x", f"--chosen={chosen}", *files]
        with _changed(file, mutant.apply(file.read_bytes())):
            for patience in PATIENCE:  # a busy machine is no reason
                limits = {test: patience * limit(seconds) for test, seconds in tests.items()}
                chosen.write_text(json.dumps(limits))
                code, text = self._forked(words, patience * limit(sum(tests.values())))
                if code is not None and "from pytest-timeout" not in text:
                    break
        if code is None:
            return "timeout", "no end"
        found = re.search(r"^(?:FAILED|ERROR) (.*)", text, re.MULTILINE)
        failure = found[1] if found else ""
        if "from pytest-timeout" in text:
            return "timeout", failure
        broken = code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR)
        if broken and not any(word in text for word in BROKEN_BY_MUTANTS):
            raise RuntimeError(f"pytest does not run: {text[-2000:]}")
        # With no tests the list of them is old.
        known = {pytest.ExitCode.OK: "survived", pytest.ExitCode.NO_TESTS_COLLECTED: "untested"}
        return known.get(pytest.ExitCode(code), "killed") if code >= 0 else "killed", failure

    def close(self) -> None:
        """End all that runs in the copy."""
        if self._server is not None:
            _end_all(self._mark)
            self._server.communicate()
        self._server = None

    def _environment(self) -> dict[str, str]:
        plain = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        return {**plain, "PYTHONPATH": str(self.folder / "src"), MARK: self._mark}

    def _pytest(self, words: Sequence[str], more: Mapping[str, str]) -> None:
        """pytest in the copy, in a process of its own."""
        subprocess.run(
            [sys.executable, "-m", "pytest", *OPTIONS, *words],
            cwd=self.folder,
            env={**self._environment(), **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _forked(self, words: Sequence[str], seconds: float) -> tuple[int | None, str]:
        """pytest in a fork of a process that has imported torch; nothing outlives it.

        Returns its exit code, None where it did not end in time, and what it printed.
        """
        server = self._warm()
        assert server.stdin is not None
        assert server.stdout is not None
        output = self.folder / "output"
        print(json.dumps([[*OPTIONS, *words], str(output)]), file=server.stdin, flush=True)
        pid = int(server.stdout.readline())
        late = threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))
        late.start()
        code = int(server.stdout.readline())
        late.cancel()
        _end_all(self._mark, but=server.pid)
        ended = None if code == -signal.SIGKILL else code
        return ended, output.read_text(errors="replace")

    def _warm(self) -> subprocess.Popen[str]:
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.mutation.warm"],
                cwd=self.folder,
                # What a mutant is compiled to is not kept.
                env={**self._environment(), "PYTHONDONTWRITEBYTECODE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert self._server.stdout is not None
            self._server.stdout.readline()
        return self._server


def limit(seconds: float) -> float:
    """The time after which what usually takes so many seconds is ended."""
    return MORE * seconds + SPARE


@contextmanager
def tree() -> Iterator[Tree]:
    """A copy of the sources, gone after the block."""
    with tempfile.TemporaryDirectory(prefix="spartito-mutants-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)  # tests run programs as other users
        copied = Tree(Path(folder))
        try:
            yield copied
        finally:
            copied.close()


@contextmanager
def _changed(file: Path, content: bytes) -> Iterator[None]:
    """``file`` has this content in the block; then it is as it was, also for what is compiled."""
    plain, about = file.read_bytes(), file.stat()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(plain)
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))


def _end_all(mark: str, but: int = 0) -> None:
    """End what was started with the mark in its environment, and forks of that."""
    sign = f"{MARK}={mark}".encode()
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != but:
            with contextlib.suppress(OSError):
                if sign in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
