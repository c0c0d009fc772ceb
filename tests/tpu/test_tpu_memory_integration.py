"""Steps compiled for a TPU's chip by Google's compiler, which no TPU is needed for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import spartito as sp
from benchmarks.tpu_memory import Needs, needs
from tests import skips
from tests.tpu import chip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIBTPU = "SPARTITO_TEST_LIBTPU"
FLOAT = 4
V5E = 16e9


@pytest.fixture
def pythons() -> tuple[str, str]:
    for kind in ("tpu", "libtpu"):
        skips.need(kind)
    tpu, libtpu = os.environ.get(chip.PYTHON), os.environ.get(LIBTPU)
    if not tpu:
        skips.skip("tpu", f"{chip.PYTHON} names no Python with torch_tpu")
    if not libtpu:
        skips.skip("libtpu", f"{LIBTPU} names no Python with libtpu")
    return tpu, libtpu


def check_update(found: Needs, parameters: int) -> None:
    """One update, in place: parameters, gradients and two moments, and no second copy of any."""
    state = FLOAT * parameters
    (update,) = (program for program in found.programs if program.name == "_fused_adamw_")
    assert 4 * state <= update.arguments <= 4.2 * state
    assert 3 * state <= update.in_place <= 3.2 * state
    assert update.output - update.in_place < 1e4
    assert update.temporary < 1e5
    assert found.tensors >= update.arguments


def test_digits(pythons: tuple[str, str], tmp_path: Path) -> None:
    found = needs(["digits", "fp32"], "v5e:1x1", *pythons, tmp_path)
    check_update(found, sum(p.numel() for p in sp.models.MnistMLP().parameters()))
    assert found.ended == ""


@pytest.mark.night
def test_gpt(pythons: tuple[str, str], tmp_path: Path) -> None:
    """Its attention is a kernel that a CPU does not have; the chip's compiler takes it."""
    found = needs(["gpt", "bf16"], "v5e:2x2", *pythons, tmp_path)
    check_update(found, sum(p.numel() for p in sp.models.GPT.small(65).parameters()))
    assert "tpu_custom_call" in found.ended
    assert found.most < V5E
