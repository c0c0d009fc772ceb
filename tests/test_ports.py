"""Scripts of other libraries, and what they became: few changed lines, and the same losses."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from difflib import ndiff
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.replicas import Replicas, warns

PORTS = Path(__file__).parents[1] / "examples" / "ports"
NAMES = sorted(path.parent.name for path in PORTS.glob("*/after.py"))
MOST = 15
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What tells Accelerate and Transformers that a launcher started them, with one process too."""

TOLERANCE = {"causal_lm": 1e-6}
"""Of the losses in fp64; Transformers computes the loss of tokens in fp32."""

BEFORE = {"ddp": 2}
"""How many processes an old script has, where it is not one."""

NOT_HERE = ("keras",)
"""Old scripts of packages that are not installed here."""


KEPT: list[dict[str, Any]] = []
"""What scripts leave, while their process lives: a DDP model that is freed after its process group
was destroyed can wait for ever for a thread that wants Python's lock."""


@pytest.fixture(scope="module")
def processes() -> Iterator[Replicas]:
    """A pool of its own, which ends with what the scripts have imported."""
    pool = Replicas()
    yield pool
    pool.close()


def code(path: Path) -> list[str]:
    """The lines of a script, but blank ones and comments."""
    lines = path.read_text().splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def changed(name: str) -> int:
    """How many lines a port has removed and added."""
    before, after = (code(PORTS / name / script) for script in ("before.py", "after.py"))
    return sum(line[:2] in ("- ", "+ ") for line in ndiff(before, after))


def test_all_eight_are_there() -> None:
    assert len(NAMES) == 8
    assert all((PORTS / name / "before.py").exists() for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_few_lines_are_changed_and_the_page_says_how_many(name: str) -> None:
    rows = (PORTS / "README.md").read_text().splitlines()
    (row,) = (row for row in rows if f"({name}/after.py)" in row)
    assert changed(name) <= MOST
    assert int(row.split("|")[-2]) == changed(name)


@warns(".*")  # what other libraries warn of is not ours to mind
def run(script: str, folder: str, strategy: str) -> list[float]:
    """The losses that a script prints, in fp64 and from one seed.

    Args:
        script: Its path.
        folder: Where it writes.
        strategy: As ``spartito run --strategy`` says it; "" for a script of another library.
    """
    source, said = Path(script), io.StringIO()
    environment = dict(os.environ)
    if strategy:
        environment["SPARTITO_STRATEGY"] = strategy
    elif os.environ["WORLD_SIZE"] == "1":
        environment = {key: value for key, value in environment.items() if key not in LAUNCHED}
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    with (
        chdir(folder),
        redirect_stdout(said),
        redirect_stderr(said),
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.object(sys, "path", [str(source.parent), *sys.path]),
    ):
        KEPT.append({"__name__": "__main__"})
        exec(compile(source.read_text(), script, "exec"), KEPT[-1])
    sys.modules.pop("model", None)
    torch.set_default_dtype(torch.float32)
    return [float(found) for found in re.findall(r"loss ([\d.e+-]+)$", said.getvalue(), re.M)]


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_the_old_script(processes: Replicas, tmp_path: Path, name: str) -> None:
    after = str(PORTS / name / "after.py")
    (alone,) = processes(run, 1, after, str(tmp_path), "one_device")
    tolerance = TOLERANCE.get(name, 1e-10)
    assert alone
    for found in processes(run, 2, after, str(tmp_path), "mirrored"):
        assert found == pytest.approx(alone, rel=tolerance)
    if name not in NOT_HERE:
        before = str(PORTS / name / "before.py")
        for found in processes(run, BEFORE.get(name, 1), before, str(tmp_path), ""):
            assert found == pytest.approx(alone, rel=tolerance)
