"""What a plan predicted stands in the report of a run, beside what the run did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spartito.cli import main
from spartito.cli.report import page_of
from spartito.errors import UserError

CHOICE = {
    "strategy": "mirrored", "step_seconds": 0.01, "step_seconds_low": 0.008,
    "step_seconds_high": 0.02, "memory_bytes": 300e6,
}  # fmt: skip
PLANNED: dict[str, Any] = {"tasks": 2, "batch_size": 64, "choices": [CHOICE]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "tasks").mkdir(parents=True)
    config = {
        "strategy": "mirrored", "cluster": {"tasks": {"worker": ["a", "b"], "ps": ["c"]}},
        "fit": {"batch_size": 64},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    epochs = [{"epoch": n + 1, "loss": 1.0, "examples_per_second": rate}
              for n, rate in enumerate((100.0, 7900.0, 8100.0, 8000.0))]  # fmt: skip
    (folder / "history.jsonl").write_text("".join(json.dumps(each) + "\n" for each in epochs))
    for number, peak in enumerate((310e6, 320e6)):
        told = json.dumps({"peak_memory_bytes": peak})
        (folder / "tasks" / f"worker-{number}.json").write_text(told)
    return folder


def plan(folder: Path, **changed: Any) -> Path:
    path = folder / "plan"
    path.mkdir(exist_ok=True)
    (path / "plan.json").write_text(json.dumps({**PLANNED, **changed}))
    return path


def test_speed_and_memory_are_beside_each_other(run: Path, tmp_path: Path) -> None:
    page = page_of(run)
    assert "Predicted and measured" not in page.read_text()
    assert page_of(run, plan(tmp_path)) == page
    text = page.read_text()
    said = "The prediction is 20% below the median epoch; it said 3,200 to 8,000."
    for words in ("Predicted and measured", "6,400", "8,000", "300 MB", "320 MB", said):
        assert words in text


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 32}, "batch_size=32, and the run had 64"),
        ({"tasks": 4}, "tasks=4, and the run had 2"),
        ({"choices": [{**CHOICE, "strategy": "mesh"}]}, "says nothing of mirrored"),
        ({"choices": 3}, "is no plan"),
    ],
)
def test_a_plan_of_something_else(
    changed: dict[str, Any], message: str, run: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        page_of(run, plan(tmp_path, **changed))


def test_no_plan_at_all(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--plan", str(tmp_path / "nowhere")]) == 2
    assert "Name what spartito plan --out wrote" in capsys.readouterr().err
