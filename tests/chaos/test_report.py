"""The page and the picture of a suite's results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from spartito.chaos.picture import picture
from spartito.chaos.report import PAGE, PICTURE, write_page
from spartito.chaos.suite import RESULTS

SVG = "{http://www.w3.org/2000/svg}"


def result(schedule: str, strategy: str = "mirrored", **other: Any) -> dict[str, Any]:
    usual = {"strategy": strategy, "schedule": schedule, "seed": 0, "broken": [], "code": 0}
    figures = {"seconds": 2.04, "restarts": 0, "repeated": 1, "lost": 0, "doubled": 0}
    return {**usual, **figures, "difference": 0.0, **other}


RUNS = [
    result("kill@worker:0#3", seconds=0.5),
    result("kill@worker:1#4"),
    result("stop@worker:1#4", restarts=1, code=69),
    result("stop@worker:1#4", "a<b", broken=["4 & more"], seconds=None),
]


def test_a_cell_has_the_worst_of_its_runs_and_the_most_seconds() -> None:
    root = ElementTree.fromstring(picture({"plain": RUNS[:3], "b": RUNS[3:]}))
    cells = [one for one in root.iter(f"{SVG}rect") if one.find(f"{SVG}title") is not None]
    assert [cell.get("class") for cell in cells] == ["on", "again", "broken"]
    words = [str(one.text) for one in root.iter(f"{SVG}text")]
    assert words.count("2.0") == 2
    assert "0.5" not in words
    assert "a<b" in words


def test_a_folder_of_results_gets_both(tmp_path: Path) -> None:
    assert write_page(tmp_path) is None
    (tmp_path / RESULTS).write_text("".join(json.dumps(run) + "\n" for run in RUNS))
    page = write_page(tmp_path)
    assert page == tmp_path / PAGE
    assert PICTURE in page.read_text()
    assert "3 of 4 runs" in page.read_text()
    assert (tmp_path / PICTURE).read_text().startswith("<svg")
