"""What `scripts/gpu` runs on GPUs, here on the CPU through the same code."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.jobs import device as checks


@pytest.mark.parametrize(
    "name", ["facts", "numbers", "denormals", "low_precision", "checkpoints", "nccl"]
)
def test_a_check_holds_on_the_cpu(name: str) -> None:
    assert checks.CHECKS[name]("cpu")


def test_what_is_for_gpus_alone_is_skipped() -> None:
    with pytest.raises(checks.Skipped):
        checks.CHECKS["memory"]("cpu")


@pytest.mark.parametrize("name", gpu.RACES)
def test_what_is_for_several_gpus_is_skipped_on_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 1)
    with pytest.raises(checks.Skipped, match="two GPUs"):
        checks.CHECKS[name]("cuda")


@pytest.mark.slow
@pytest.mark.parametrize("name", gpu.RACES)
def test_both_sides_of_a_race_train_the_same_model(name: str) -> None:
    """Where they train another one the check fails; their times mean nothing here."""
    outcome = gpu.run(name, "cpu", limit=200)
    assert outcome.status == "ok", outcome.reason
    assert len(outcome.found) == 3


def test_a_check_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_plain", lambda _: [1.0, 2.0, 3.0, float("nan")])
    with pytest.raises(AssertionError, match="in plain torch"):
        checks.numbers("cpu")


@pytest.mark.slow
def test_strategies_agree_with_one_device() -> None:
    outcome = gpu.run("strategies", "cpu", limit=200)
    assert outcome.status == "ok", outcome.reason
    assert outcome.found["strategies"] == 2


def test_a_check_that_takes_too_long_is_ended() -> None:
    began = time.monotonic()
    outcome = gpu.run("contracts", "cpu", limit=1.5)
    assert (outcome.status, outcome.reason) == ("failed", "took more than 2 s")
    assert outcome.seconds == pytest.approx(time.monotonic() - began, abs=1)
    assert gpu.run("facts", "cpu", limit=0.5).status == "skipped"


@pytest.mark.parametrize(
    ("text", "code", "status"),
    [
        ('warning\n{"status": "ok", "found": {"a (s)": 1.5}}\n', 0, "ok"),
        ('{"status": "skipped", "reason": "why"}', 0, "skipped"),
        ("Traceback\nCUDA error: an illegal <access>\n", 1, "failed"),
        ('{"status": "ok", "found": {}}\nSegmentation fault', -11, "failed"),
        ("", -9, "failed"),
        ("3", 0, "failed"),
    ],
)
def test_how_a_check_ended(text: str, code: int, status: str) -> None:
    outcome = gpu.outcome_of("facts", 1.0, text, code)
    assert outcome.status == status
    assert status == "ok" or outcome.reason


def test_the_page_says_where_it_ran_and_escapes(tmp_path: Path) -> None:
    outcome = gpu.outcome_of("facts", 1.0, "an illegal <access> | here", 1)
    gpu.write(tmp_path, "cpu", [outcome])
    page, table = (tmp_path / "gpu.html").read_text(), (tmp_path / "gpu.md").read_text()
    assert "nothing here was run on a GPU" in page
    assert "nothing here was run on a GPU" in table
    assert "illegal &lt;access&gt;" in page
    assert "<access> \\| here |" in table
    assert {line.replace("\\|", "").count("|") for line in table.splitlines()[2:]} == {6}
