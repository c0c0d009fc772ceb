from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from spartito.comparison.report.drawings import strategy_colours
from spartito.comparison.report.page import (
    render_comparison,
    write_comparison,
    write_comparison_page,
)
from spartito.comparison.report.results import comparison
from spartito.comparison.report.table import bars, table
from spartito.errors import UserError
from spartito.registry import strategy_names
from spartito.report.charts import SERIES
from tests.comparison.made_runs import everything, failed, history, record, run, server, workers
from tests.pages import Checker, checked


def check(made: dict[str, Any]) -> tuple[str, Checker]:
    text = render_comparison(made)
    return text, checked(text)


def test_the_page_stands_alone() -> None:
    text, checker = check(everything())
    assert "http" not in text
    assert "@import" not in text
    assert not {"script", "link"} & checker.tags
    assert all(address.startswith("#") for address in checker.addresses)
    assert {a[1:] for a in checker.addresses} <= set(checker.ids)
    assert len(checker.ids) == len(set(checker.ids))
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawings)) <= {"#ffffff"}
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    style = text[: text.index("</style>")]
    light, dark = style.split("prefers-color-scheme: dark", 1)
    assert all(f"{name}:" in light and f"{name}:" in dark for name in used)


def test_the_page_shows_the_comparison() -> None:
    text, checker = check(everything())
    for words in (
        "<h1>mnist</h1>",
        "comparison · 5 strategies · 2 workers · 1 parameter server · 2 cores",
        "<p>Choose parameter_server",
        "central_storage failed",
        "ValueError: no luck",
        "Accuracy over steps",
        "Accuracy over time",
        "Loss over steps",
        "Loss over time",
        "Staleness of parameter_server",
        "Noise of the validation accuracy",
        "Throughput (examples/s) against workers",
        ">ideal<",
        "Validation accuracy, mirrored",
        "Final validation accuracy against the batch",
        "Steps to the goal against the batch",
        "25% of its speed",
        "16.0 GB",
    ):
        assert words in text, words
    rows = {row[0]: row for row in checker.rows}
    assert rows["parameter_server"][-1] in ("1.14 / 7", "5.0%")
    assert rows["central_storage"] == ["central_storage", "2", "failed: ValueError: no luck"]


def test_missing_figures_are_dashes() -> None:
    bare, other = run("mirrored", tasks=[], history=history(2)), run("parameter_server")
    found = table(comparison(record(bare, other, goal=("val_accuracy", 2.0))))
    row = dict(zip((head for head, _ in found.heads), found.rows[0], strict=True))
    for name in ("time to goal", "moved per step", "waits for tasks", "peak memory"):
        assert row[name] == "–", name
    assert row["waits for data"] == "2.0%"
    assert row["workers"] == "2"


def test_columns_without_a_figure_are_left_out() -> None:
    found = table(comparison(record(run("mirrored", tasks=[], history=history(2)))))
    assert not {"time to goal", "peak memory", "staleness"} & {head for head, _ in found.heads}
    assert all("–" not in row for row in found.rows)


def test_the_best_of_a_column_is_marked_among_those_that_ended_well() -> None:
    broken = run("parameter_server", history=history(rate=90_000), error="killed")
    made = record(run("one_device", 1, history=history(rate=10_000)), run("mirrored"), broken)
    found = table(comparison(made))
    rates = [head for head, _ in found.heads].index("examples/s")
    assert [rates in best for best in found.best] == [False, True, False]
    assert not any(table(comparison(record(run("mirrored")))).best)
    twins = record(run("mirrored"), run("one_device", 1), run("central_storage"))
    assert not any(table(comparison(twins)).best)
    assert [rates in best for best in table(comparison({**twins, "runs": [
        *twins["runs"], run("parameter_server", history=history(rate=10_000))]})).best] == [
        True, True, True, False]  # fmt: skip


def test_the_table_on_a_terminal() -> None:
    text = str(table(comparison(record(run("mirrored"), failed("central_storage")))))
    first, second, *_, last = text.splitlines()
    assert first.split() == ["strategy", "mirrored", "central_storage"]
    assert second.split() == ["workers", "2", "2"]
    assert last == "central_storage failed: ValueError: no luck"
    assert max(map(len, text.splitlines())) < 80


def test_bars_are_as_long_as_their_values() -> None:
    tasks = [*workers(2), server({0: 75, 2: 25})]
    made = record(
        run("one_device", 1, history=history(rate=10_000)),
        run("parameter_server", history=history(rate=40_000), tasks=tasks),
    )
    found = {group.title: group for group in bars(comparison(made))}
    speeds = found["Throughput, examples/s"].rows
    assert [round(bar.fraction, 2) for bar in speeds] == [0.25, 1.0]
    late = found["Staleness of parameter_server"].rows
    assert [(bar.name, bar.value) for bar in late] == [("0", "75.0%"), ("2", "25.0%")]
    assert "standard deviation" in found["Noise of the validation accuracy"].note


@pytest.mark.parametrize(
    "made",
    [
        record(),
        record(failed("mirrored")),
        record(run("mirrored", history=history(1), tasks=[], config={})),
        record(run("mirrored", history=[{"epoch": 1, "step": 1, "loss": float("nan")}])),
        record(run("mirrored", history=[{"epoch": 1, "val_loss": None}])),
        record(run("new_strategy"), run("one_device", 1), goal=("absent", 3.0)),
    ],
    ids=["none", "failed", "one epoch", "nan", "null", "unknown"],
)
def test_comparisons_that_say_little(made: dict[str, Any]) -> None:
    check(made)


def test_what_the_user_wrote_is_escaped() -> None:
    made = record(failed("mirrored", "<script>alert(1)</script>"))
    made["target"] = "<i>train</i>.py"
    text, checker = check(made)
    assert "script" not in checker.tags
    assert "<i>train" not in text


def test_the_record_is_written_with_its_sentences(tmp_path: Path) -> None:
    write_comparison(tmp_path, everything())
    written = json.loads((tmp_path / "compare.json").read_text())
    assert written["sentences"][0].startswith("Choose parameter_server")
    assert {**written, "sentences": None} == {**everything(), "sentences": None}
    page = write_comparison_page(tmp_path)
    assert page == tmp_path / "compare.html"
    assert page.read_text() == render_comparison(everything())


def test_no_comparison_no_page(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no comparison"):
        write_comparison_page(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_page_says_what_was_run() -> None:
    made = {**everything(), "arguments": ["--size", "a b"]}
    text, _ = check(made)
    assert "<dt>arguments</dt><dd>--size &#39;a b&#39;</dd>" in text
    assert "25% of its speed, under mirrored, multi_worker_mirrored, parameter_server</dd>" in text
    legend = re.search(r'<ul class="key">.*?</ul>', text, flags=re.DOTALL)
    assert legend
    assert "parameter_server" in legend[0]
    assert "central_storage" not in legend[0]  # it failed before its first epoch


def test_repeats_show_their_spread() -> None:
    made = [
        run("mirrored", setting="mirrored", run=f"mirrored {n}", history=history(rate=rate),
            repeat=n, tasks=workers(n))
        for n, rate in enumerate([20_000, 40_000, 30_000], start=1)
    ]  # fmt: skip
    found = comparison(record(*made))
    (row,) = table(found).rows
    assert row[5] == "30,013 (20,009 to 40,017)"
    (bar,) = bars(found)[0].rows
    assert bar.fraction == pytest.approx(0.75)
    assert bar.span == pytest.approx((0.5, 1.0))
    text, checker = check(record(*made))
    assert "<u style=" in text
    assert "<dt>repeats</dt><dd>3</dd>" in text
    named = [row[1] for row in checker.rows if row[1:2] and row[1].startswith("worker ")]
    assert named == ["worker 0"]  # of the first one
    assert not any(b.span for b in bars(comparison(everything()))[0].rows)


def test_no_two_strategies_have_the_same_colour() -> None:
    runs = [run(name) for name in strategy_names()]
    runs.insert(1, run("one_device", 1, threads=1, setting="threads"))
    found = strategy_colours(comparison(record(*runs)))
    assert len(found) == len(runs) == len(set(found.values()))
    style = render_comparison(record(*runs))
    for number in range(1, len(SERIES) + 1):
        paints = re.findall(rf"--series-{number}: (#[0-9a-f]{{6}});", style)
        assert len(paints) == 2, number  # on light and on dark
    for mode in (0, 1):
        paints = [re.findall(rf"--series-{n}: (#[0-9a-f]+);", style)[mode] for n in range(1, 13)]
        assert len(set(paints)) == 12


def test_the_page_says_what_diverged_and_how_busy_the_machine_was() -> None:
    bad = run("mirrored", history=[{**line, "loss": None} for line in history()])
    text, _ = check(record(run("one_device", 1, load={"others": 0.31, "pressure": 0.5}), bad))
    assert "mirrored diverged: its loss is NaN from epoch 1 of 10 on" in text
    assert "31.0% of the cores taken by other programs" in text


def test_strategies_that_differ_in_signs_alone_have_their_own_drawings() -> None:
    texts = ["local_sgd(mixing=1)", "local_sgd(mixing=-1)", 'local_sgd(outer="<&\'>")']
    settings: tuple[tuple[int, str | None], ...] = ((2, None), (4, "workers"))
    made = record(
        *(
            run(text, count, run=f"{number}-{count}", setting=f"{number}-{count}", sweep=sweep)
            for number, text in enumerate(texts)
            for count, sweep in settings
        )
    )
    text, checker = check(made)
    assert len(checker.ids) == len(set(checker.ids))
    assert set(strategy_colours(comparison(made))) == set(texts)
    assert text.count("local_sgd(mixing=-1)") > 3
    assert "<&'>" not in text


def test_the_goal_is_among_the_settings() -> None:
    text, _ = check(record(run("mirrored"), goal=("val_accuracy", 0.9)))
    assert "<dt>goal</dt><dd>validation accuracy 90.00%</dd>" in text
    assert "<dt>goal</dt>" not in check(record(run("mirrored")))[0]
