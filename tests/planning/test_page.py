"""A plan as a page, as figures and as a trace of a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spartito.cli import main
from spartito.declared import parse
from spartito.planning.costs.parts import Situation
from spartito.planning.page import PAGE, RECORD, TRACE, trace
from spartito.planning.scaling import TIMES, Curve, curves
from spartito.planning.search import predict, search
from spartito.planning.simulation import SHOWN_STEPS
from tests.planning.made import PROFILE, situation, without_variation


@pytest.fixture
def saved(tmp_path: Path) -> str:
    path = tmp_path / "p.json"
    path.write_text(PROFILE.text())
    return str(path)


def test_a_folder_has_the_page_the_figures_and_a_trace(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan"
    words = ["plan", "--profile", saved, "--machines=4", "--link=1gbit", "--goal=epochs=3"]
    for _ in range(2):  # over its own files
        assert main([*words, "--out", str(out)]) == 0
    assert f"Pictures:      {out / PAGE}" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == sorted([PAGE, RECORD, TRACE])
    page, found = (out / PAGE).read_text(), json.loads((out / RECORD).read_text())
    best = found["choices"][0]["strategy"]
    for part in (best.replace('"', "&#34;"), "What a task does in a step", "Not possible", "<svg"):
        assert part in page
    tasks = {e["pid"] for e in json.loads((out / TRACE).read_text())["traceEvents"]}
    assert tasks == {0, 1, 2}
    assert page.count("task 7") == 3  # of the best three strategies
    assert "http" not in page.replace("http://www.w3.org", "")  # it stands alone


def test_files_of_the_user_stay(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (PAGE, RECORD, TRACE):
        own = tmp_path / name
        own.write_text("mine")
        assert main(["plan", "--profile", saved, "--out", str(tmp_path)]) == 2
        assert name in capsys.readouterr().err
        assert own.read_text() == "mine"
        own.unlink()


def test_the_parts_of_each_task_come_one_after_the_other() -> None:
    steady = Situation(without_variation(), situation().cluster, 512)
    choices = search(steady).choices[:2]
    events = trace(choices)["traceEvents"]
    for number, choice in enumerate(choices):
        tasks = choice.situation.cluster.tasks
        for task in range(tasks):
            own = [e for e in events if (e["pid"], e.get("tid"), e["ph"]) == (number, task, "X")]
            end = 0.0
            for part in own:
                assert part["ts"] == pytest.approx(end)
                end = part["ts"] + part["dur"]
            assert end == pytest.approx(SHOWN_STEPS * choice.cost.step * 1e6)


def test_curves_are_what_is_predicted_for_each_number_of_machines() -> None:
    names = ("multi_worker_mirrored", "local_sgd(groups=4, every=100)", "sharded(zero=2)")
    choices = [predict(parse(name), situation(machines=4)) for name in names]
    found = {curve.strategy: curve for curve in curves(choices, 0.0)}
    for choice in choices:
        curve = found[str(choice.strategy)]
        assert curve.tasks[-1] == TIMES * 8
        assert curve.rates[curve.tasks.index(8)] == pytest.approx(choice.rate)
    many = predict(parse("local_sgd(groups=40, every=100)"), situation(machines=40))
    assert found[str(choices[1].strategy)].rates[-1] == pytest.approx(many.rate)


@pytest.mark.parametrize(
    ("rates", "bend"),
    [
        ([1.0, 2.0, 4.0, 8.0], None),
        ([1.0, 1.9, 2.0, 1.5], 2),
        ([1.0, None, 1.3, 1.3], 1),
        ([None, 1.0, 1.2, 1.5], None),
    ],
)
def test_where_a_curve_bends(rates: list[float | None], bend: int | None) -> None:
    assert Curve("mirrored", [1, 2, 4, 8], rates).bend == bend
