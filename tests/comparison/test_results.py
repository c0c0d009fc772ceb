from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.comparison.report.results import (
    Figures,
    Goal,
    comparison,
    noise,
    read_comparison,
    read_result,
)
from spartito.errors import UserError
from tests.comparison.made_runs import (
    everything,
    failed,
    history,
    record,
    run,
    server,
    task,
    workers,
    write_folder,
)


def figures(made: dict[str, Any], goal: tuple[str, float] | None = None) -> Figures:
    (found,) = comparison(record(made, goal=goal)).all_runs
    return found


def test_a_run_folder_becomes_a_record(tmp_path: Path) -> None:
    made = run("parameter_server", tasks=[*workers(2), server({0: 3})])
    seen = [{"epoch": 10, "step": 1250, "val_f1": 0.5, "seconds": 0.1}]
    result = read_result(write_folder(tmp_path / "run", made, seen))
    assert [epoch["step"] for epoch in result["history"]] == [125 * n for n in range(1, 11)]
    assert result["history"][-1]["val_f1"] == 0.5
    assert {one["task"] for one in result["tasks"]} == {"worker 0", "worker 1", "ps 0"}
    assert result["config"] == made["config"]


def test_a_folder_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    nothing: dict[str, Any] = {"history": [], "tasks": [], "config": {}}
    assert read_result(tmp_path / "absent") == nothing


def test_a_file_cut_short_is_left_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", run("mirrored"))
    (folder / "tasks/worker-1.json").write_text('{"task": "wor')
    assert [one["task"] for one in read_result(folder)["tasks"]] == ["worker 0"]


def test_the_figures_of_a_run() -> None:
    tasks = [
        *workers(2, waited_for_tasks_seconds=2.0, bytes_sent=500_000_000),
        server({0: 60, 1: 30, 4: 10}, bytes_sent=1_500_000_000, peak_memory_bytes=200_000_000,
               waited_for_tasks_seconds=9.9),
    ]  # fmt: skip
    found = figures(run("parameter_server", ps=1, tasks=tasks), goal=("val_accuracy", 0.94))
    values = [epoch["val_accuracy"] for epoch in history()]
    assert (found.quality, found.final, found.best) == ("val_accuracy", values[-1], max(values))
    assert found.loss == history()[-1]["val_loss"]
    assert found.rate == pytest.approx(40_000, rel=0.01)
    first = next(n for n, value in enumerate(values, start=1) if value >= 0.94)
    assert found.steps_to_goal == 125 * first
    assert found.seconds_to_goal == pytest.approx(first * 0.2)
    assert found.bytes_per_step == 3_000_000_000 / 1250  # received: more than was told as sent
    assert found.waited_for_tasks == 0.2  # a server waits by trade
    assert found.waited_for_data == 0.05
    assert found.peak_memory == 390_000_000
    assert found.memory["ps 0"] == 200_000_000
    assert found.staleness == {0: 60, 1: 30, 4: 10}
    assert found.mean_staleness == 0.7
    assert found.times[-1] == pytest.approx(2.0)


def test_what_is_not_measured_is_none_and_not_zero() -> None:
    found = figures(run("mirrored", tasks=[], history=history(2)), goal=("val_accuracy", 0.99))
    for name in (
        "seconds_to_goal",
        "steps_to_goal",
        "bytes_per_step",
        "waited_for_tasks",
        "peak_memory",
        "mean_staleness",
    ):
        assert getattr(found, name) is None, name
    assert found.noise == {}
    assert found.waited_for_data == pytest.approx(0.02)  # the history knows it, too


def test_a_measured_zero_stays() -> None:
    alone = workers(1, waited_for_tasks_seconds=0.0, bytes_sent=0, bytes_received=0)
    found = figures(run("one_device", 1, tasks=alone))
    assert (found.bytes_per_step, found.waited_for_tasks) == (0, 0)


def test_a_task_without_some_figures() -> None:
    found = figures(run("mirrored", tasks=[task("worker 0"), {"task": "worker 1"}]))
    assert found.memory == {"worker 0": 390_000_000}
    assert found.waited_for_tasks == 0.1


def test_the_first_epoch_warms_up() -> None:
    epochs = history(5)
    epochs[0]["examples_per_second"] = 1.0
    found = figures(run("mirrored", history=epochs))
    assert found.rate_noise is not None
    assert found.rate_noise < 500


def test_the_rate_is_examples_over_seconds() -> None:
    """Work that moves between epochs: 100 in 1 s, 100 in 0.1 s and 100 in 1.9 s are 300 in 3 s."""
    rates = (50.0, 100.0, 1000.0, 100 / 1.9)
    epochs = [
        {"epoch": n, "step": 10 * n, "loss": 1.0, "examples_per_second": rate}
        for n, rate in enumerate(rates, start=1)
    ]
    assert figures(run("parameter_server", history=epochs)).rate == pytest.approx(100)
    epochs[-1]["step"] = 35  # half an epoch, at its own rate
    found = figures(run("parameter_server", history=epochs)).rate
    assert found == pytest.approx(250 / (1 + 0.1 + 0.95))


def test_repeats_become_one_row() -> None:
    made = [
        run("mirrored", setting="mirrored", run=f"mirrored {n}", repeat=n,
            history=history(rate=rate, accuracy=accuracy))
        for n, (rate, accuracy) in enumerate([(40_000, 0.93), (20_000, 0.97), (30_000, 0.95)])
    ]  # fmt: skip
    bad = run("mirrored", setting="mirrored", run="mirrored 9", history=[], error="no luck")
    found = comparison(record(*made, bad, run("one_device", 1), goal=("val_accuracy", 0.94)))
    mirrored, alone = found.runs
    assert (mirrored.title, alone.title) == ("mirrored", "one_device")
    assert mirrored.rate == pytest.approx(30_000, rel=0.01)
    assert mirrored.rates == pytest.approx([40_000, 20_000, 30_000], rel=0.01)
    assert mirrored.run == "mirrored 0"  # all strategies have its seed: their curves are drawn
    assert mirrored.final == pytest.approx(0.95, abs=0.002)
    # two of three came there: after 4 epochs of 0.4 s, after 5 of 0.267 s, and never
    assert mirrored.seconds_to_goal == pytest.approx(4 * 0.4, rel=0.2)
    assert mirrored.failures == [("mirrored 9", "no luck")]
    assert (mirrored.error, alone.rates) == (None, [alone.rate])


def test_a_goal_that_most_repeats_miss_is_missed() -> None:
    made = [
        run("mirrored", setting="mirrored", run=f"{n}", history=history(accuracy=accuracy))
        for n, accuracy in enumerate([0.95, 0.90, 0.90])
    ]
    (found,) = comparison(record(*made, goal=("val_accuracy", 0.94))).runs
    assert found.seconds_to_goal is None
    assert found.steps_to_goal is None


def test_an_evaluator_fills_in_what_the_chief_left(tmp_path: Path) -> None:
    epochs = [{k: v for k, v in e.items() if not k.startswith("val_")} for e in history(3)]
    seen = [{"epoch": 2, "step": 250, "val_accuracy": 0.9, "seconds": 99.0}]
    made = run("parameter_server", history=epochs)
    found = figures({**made, **read_result(write_folder(tmp_path / "run", made, seen))})
    assert found.series("val_accuracy") == [None, 0.9, None]
    assert (found.final, found.best) == (0.9, 0.9)
    assert found.times[-1] == pytest.approx(0.6)


def test_no_seconds_no_time_to_the_goal() -> None:
    epochs = [{k: v for k, v in e.items() if k != "seconds"} for e in history()]
    found = figures(run("mirrored", history=epochs), goal=("val_accuracy", 0.94))
    assert found.seconds_to_goal is None
    assert found.steps_to_goal is not None


@pytest.mark.parametrize(
    ("epoch", "quality"),
    [
        ({"loss": 1, "accuracy": 1, "val_loss": 1, "val_auc": 1}, "val_auc"),
        ({"loss": 1, "val_loss": 1}, "val_loss"),
        ({"loss": 1, "accuracy": 1}, "accuracy"),
        ({"loss": 1}, "loss"),
    ],
)
def test_what_models_are_compared_by(epoch: dict[str, float], quality: str) -> None:
    assert figures(run("mirrored", history=[{"epoch": 1, "step": 1, **epoch}])).quality == quality


def test_the_goals_figure_comes_first() -> None:
    assert figures(run("mirrored"), goal=("accuracy", 0.9)).quality == "accuracy"
    assert figures(run("mirrored"), goal=("absent", 0.9)).quality == "val_accuracy"


def test_a_goal_knows_its_side() -> None:
    assert Goal("val_accuracy", 0.9).is_reached(0.9)
    assert not Goal("val_accuracy", 0.9).is_reached(0.89)
    assert Goal("val_loss", 0.9).is_reached(0.5)
    assert not Goal("val_loss", 0.9).is_reached(math.nan)
    assert str(Goal("val_accuracy", 0.9)) == "validation accuracy 90.00%"


def test_a_loss_that_is_not_a_number_is_not_missing() -> None:
    found = figures(run("mirrored", history=[{"epoch": 1, "step": 1, "loss": math.nan}]))
    assert found.loss is not None
    assert math.isnan(found.loss)
    assert found.best is None


def test_the_noise_of_a_curve_is_that_of_its_jumps() -> None:
    draw = random.Random(3)
    curve = [0.5 + 0.01 * n + draw.gauss(0, 0.02) for n in range(400)]
    assert noise(curve) == pytest.approx(0.02, rel=0.15)


@given(st.floats(-10, 10), st.floats(-10, 10), st.integers(5, 40))
def test_a_steady_course_has_no_noise(start: float, slope: float, epochs: int) -> None:
    found = noise([start + slope * n for n in range(epochs)])
    assert found == pytest.approx(0, abs=1e-9)


def test_too_little_to_see_noise() -> None:
    assert noise([1, 2, 1, 2]) is None
    assert noise([1, 2, None, 2, 1, 2]) is None
    assert noise([1, 2, math.nan, 2, 1, 2]) is None


def test_the_runs_of_the_table_and_of_sweeps() -> None:
    found = comparison(everything())
    assert len(found.runs) == 5
    assert [run.title for run in found.done] == [
        "one_device",
        "mirrored",
        "multi_worker_mirrored",
        "parameter_server",
    ]
    assert {s: [r.workers for r in runs] for s, runs in found.points("workers").items()} == {
        "mirrored": [1, 2, 4]
    }
    sizes = {s: [r.batch_size for r in runs] for s, runs in found.points("batch_size").items()}
    assert sizes == {s: [32, 64, 128, 512, 2048, 8192] for s in ("one_device", "mirrored")}
    assert comparison(record(run("mirrored"), failed("one_device"))).points("workers") == {}


def test_a_comparison_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"compare\.json is no comparison"):
        read_comparison(tmp_path)
    (tmp_path / "compare.json").write_text("{")
    with pytest.raises(UserError, match="is no comparison"):
        read_comparison(tmp_path)
    (tmp_path / "compare.json").write_text(json.dumps(record()))
    assert read_comparison(tmp_path)["runs"] == []
