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
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.mutants import Mutant

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "runs", "__pycache__", "*.egg-info")
MARK = "SPARTITO_TEST_MUTANT"
PART = "PYTEST_PART"
"""The variable that says which part of the tests a recorder sees."""

TEST_LIMIT = 150.0
"""Seconds that one test may take under a mutant, unless its own limit says otherwise."""

MORE, SPARE = 3.0, 60.0
"""A run may take so many times what its tests take without a mutant, and so many seconds."""


@dataclass(frozen=True, slots=True)
class Map:
    """Which tests enter a function ("path: function"), how long each takes, which failed."""

    entered: dict[str, list[str]]
    seconds: dict[str, float]
    failed: list[str]

    def save(self, file: Path) -> None:
        tests = [*self.seconds]
        number = {test: index for index, test in enumerate(tests)}
        entered = {name: [number[x] for x in found] for name, found in self.entered.items()}
        seconds = [round(self.seconds[test], 3) for test in tests]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps([tests, seconds, entered, self.failed]))

    @classmethod
    def load(cls, file: Path) -> Map:
        tests, seconds, entered, failed = json.loads(file.read_text())
        names = {name: [tests[index] for index in found] for name, found in entered.items()}
        return cls(names, dict(zip(tests, seconds, strict=True)), failed)

    def tests_of(self, mutant: Mutant, budget: float) -> list[str]:
        """The tests that enter the mutant's function, the quickest first, up to ``budget`` s."""
        chosen: list[str] = []
        total = 0.0
        found = set(self.entered.get(f"{mutant.path}: {mutant.function}", ())) - set(self.failed)
        for test in sorted(found, key=lambda one: (self.seconds[one], one)):
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

    def record(self, targets: Sequence[str], processes: int) -> Map:
        """Run the tests ``targets`` without a mutant, by so many processes of pytest."""
        folder = self.folder / "entered"
        folder.mkdir()
        files = [file for target in targets for file in self._files(target)]
        parts = {str(n): files[n::processes] for n in range(processes) if files[n::processes]}
        for part in parts:
            (folder / f"current-{part}").write_bytes(bytes(4))
            (folder / f"entered-{part}").touch()
        source = self.folder / "src"
        shutil.copy(Path(__file__).with_name("recorder.py"), source / "recorder.py")
        init = source / "spartito" / "__init__.py"
        plain = init.read_text()
        init.write_text(f"{plain}\nimport recorder\n")
        with ThreadPoolExecutor(processes) as pool:
            for part, its in parts.items():
                pool.submit(self._pytest, [f"--entered={folder}", *its], None, {PART: part})
        init.write_text(plain)
        entered: defaultdict[str, set[str]] = defaultdict(set)
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
                number, path, function = line.split(" ", 2)
                if int(number) in names:
                    entered[f"{path}: {function}"].add(names[int(number)])
        shutil.rmtree(folder)
        return Map({k: sorted(v) for k, v in entered.items()}, dict(seconds), sorted(failed))

    def _files(self, target: str) -> list[str]:
        """The files with tests of a folder, or ``target`` itself."""
        found = sorted((self.folder / target).rglob("test_*.py"))
        return [str(file.relative_to(self.folder)) for file in found] or [target]

    def run(self, mutant: Mutant, tests: Sequence[str], seconds: float) -> tuple[str, str]:
        """Run ``tests`` with the mutant: "killed", "timeout" or "survived", and what failed."""
        file = self.folder / "src" / "spartito" / mutant.path
        plain = file.read_bytes()
        chosen = self.folder / "chosen"
        chosen.write_text("\n".join(tests))
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        try:
            file.write_bytes(mutant.apply(plain))
            words = ["-x", f"--timeout={TEST_LIMIT}", f"--chosen={chosen}", *files]
            done = self._pytest(words, limit=seconds * MORE + SPARE)
        finally:
            file.write_bytes(plain)
        if done is None:
            return "timeout", "no end"
        found = re.search(r"^(?:FAILED|ERROR) (.*)", done.stdout, re.MULTILINE)
        failure = found[1] if found else ""
        if "from pytest-timeout" in done.stdout:
            return "timeout", failure
        # 4 and 5: there are no such tests, as the list of them is old.
        return {0: "survived", 4: "untested", 5: "untested"}.get(done.returncode, "killed"), failure

    def _pytest(
        self, words: Sequence[str], limit: float | None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str] | None:
        """pytest in the copy; nothing that it starts outlives it. None: not within ``limit``."""
        mark = secrets.token_hex(8)
        plain = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        own = {"PYTHONPATH": str(self.folder / "src"), "PYTHONDONTWRITEBYTECODE": "1", MARK: mark}
        options = ["-q", "-p", "no:cacheprovider", "-p", "tests.mutation.plugin"]
        quick = ["-m", "not docker and not slurm and not slow"]
        try:
            return subprocess.run(
                [sys.executable, "-m", "pytest", *options, *quick, *words],
                cwd=self.folder,
                env={**plain, **own, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_all(f"{MARK}={mark}".encode())


@contextmanager
def tree() -> Iterator[Tree]:
    """A copy of the sources, gone after the block."""
    with tempfile.TemporaryDirectory(prefix="spartito-mutants-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)  # tests run programs as other users
        yield Tree(Path(folder))


def _end_all(mark: bytes) -> None:
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
