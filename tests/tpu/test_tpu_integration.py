"""Trainings on a device of torch_tpu, whose library computes on the CPU here."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import skips
from tests.tpu import chip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PROGRAM = "tests.tpu.trainings"
EXACT = 1e-12


@pytest.fixture
def python() -> str:
    skips.need("tpu")
    found = os.environ.get(chip.PYTHON)
    if not found:
        skips.skip("tpu", f"{chip.PYTHON} names no Python with torch_tpu")
    return found


def run(python: str, folder: Path, *words: str, **more: str) -> tuple[Any, str]:
    """What a program has found, and what it printed; ``words`` begin with its name or a command."""
    module = [] if words[0] == "-m" else ["-m", PROGRAM]
    done = subprocess.run(
        [python, *module, *words],
        cwd=folder,
        env={**chip.environment(python), "PYTHONPATH": str(ROOT), **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    (file,) = folder.glob("*.json")
    return json.loads(file.read_text()), done.stdout


def furthest(one: Any, other: Any) -> float:
    """The largest difference of two structures of numbers."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max(furthest(one[name], other[name]) for name in one)
    if isinstance(one, list):
        assert len(one) == len(other)
        return max((furthest(a, b) for a, b in zip(one, other, strict=True)))
    return abs(float(one) - float(other))


def test_the_numbers_of_a_cpu(python: str, tmp_path: Path) -> None:
    found, _ = run(python, tmp_path, "numbers")
    for name in ("one_device", "tpu", "unfilled"):
        assert furthest(found[name], found["cpu"]) <= EXACT, name
    on = [found["cpu, on from tpu"], found["tpu, on from cpu"]]
    assert furthest(*on) <= EXACT
    first, *_, last = on[0]["curves"]["loss"]
    assert last < first < found["cpu"]["curves"]["loss"][0]
    assert found["its own"] == "tpu:0"


def test_random_numbers(python: str, tmp_path: Path) -> None:
    found, _ = run(python, tmp_path, "randoms")
    assert furthest(*found["one seed"]) == 0
    assert furthest(*found["deterministic"]) <= EXACT
    assert furthest(found["one seed"][0], found["deterministic"][0]) > 1e-6


def test_bf16(python: str, tmp_path: Path) -> None:
    found, _ = run(python, tmp_path, "rounded")
    cpu, tpu = (found[device]["curves"]["loss"] for device in ("cpu", "tpu"))
    assert tpu[-1] < tpu[0]
    assert tpu == pytest.approx(cpu, rel=0.02)  # eight bits of a mantissa, differently fused


def compiling(python: str, folder: Path, *words: str) -> tuple[Any, int]:
    """The losses of two epochs, and how many programs were compiled for them."""
    losses, text = run(python, folder, "epochs", *words, TF_CPP_MIN_LOG_LEVEL="0")
    (told,) = re.findall(r"num_compilations=(\d+)", text)
    return losses, int(told)


def test_more_batches_are_no_more_programs(python: str, tmp_path: Path) -> None:
    compiled = []
    for batches in (2, 3):
        (folder := tmp_path / str(batches)).mkdir()
        compiled.append(compiling(python, folder, "fill", str(8 * batches))[1])
    assert compiled[0] == compiled[1]


def test_a_smaller_batch_is_compiled_once_more_without_being_filled(
    python: str, tmp_path: Path
) -> None:
    compiled, losses = {}, {}
    for fill in ("fill", "leave"):
        (folder := tmp_path / fill).mkdir()
        losses[fill], compiled[fill] = compiling(python, folder, fill)
    assert compiled["fill"] < compiled["leave"], compiled
    assert furthest(losses["fill"], losses["leave"]) < 1e-5


@pytest.mark.parametrize("strategy", ["tpu", "mesh(model=2)", "sharded(zero=1)", "sharded"])
def test_several_processes(python: str, tmp_path: Path, strategy: str) -> None:
    """Each with a device: their sums go through the host, as torch_tpu joins none of a CPU's."""
    alone, _ = run(python, tmp_path, "numbers")
    (folder := tmp_path / "several").mkdir()
    options = json.dumps({"device": "tpu", "communication": "sockets"})
    found, text = run(
        python, folder, "-m", "spartito", "run", "--workers", "2", "--strategy", strategy,
        "--strategy-options", options, str(ROOT / "tests/tpu/trainings.py"), "several",
    )  # fmt: skip
    assert furthest(found, alone["cpu"]) <= EXACT, text
