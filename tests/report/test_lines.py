from __future__ import annotations

import json
import math
from pathlib import Path

from spartito.report.evaluations import append_evaluation
from spartito.report.lines import line_of, record_of
from spartito.report.page import HISTORY, read_run


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    figures = {"epoch": 1, "step": 5, "loss": math.nan, "val_iou": [0.5, math.nan], "name": "x"}
    line = line_of({**figures, "perplexity": math.inf})
    strict = json.loads(line, parse_constant=lambda name: 1 / 0)
    assert strict == {**figures, "loss": None, "val_iou": [0.5, None], "perplexity": None}
    again = record_of(line)
    assert math.isnan(again["loss"])
    assert math.isnan(again["val_iou"][1])
    assert again["name"] == "x"
    (tmp_path / HISTORY).write_text(line + "\n" + line[:20])
    append_evaluation(tmp_path, {"step": 5, "val_loss": math.nan})
    assert "NaN" not in (tmp_path / "evaluations.jsonl").read_text()
    (epoch,) = read_run(tmp_path).epochs
    assert math.isnan(epoch["loss"])  # the page says so
    assert math.isnan(epoch["val_loss"])
