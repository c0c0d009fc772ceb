from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from spartito.errors import UserError
from spartito.report import write_report
from spartito.report.charts import NEUTRAL, Chart, Line, svg
from spartito.report.page import best_epoch, charts, headline, read_run
from tests.pages import checked


def page(folder: Path) -> str:
    return write_report(folder).read_text()


def history(folder: Path, *lines: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "history.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def test_the_page_stands_alone(run_dir: Path) -> None:
    text = page(run_dir)
    checker = checked(text)
    assert "http" not in text
    assert "@import" not in text
    assert "script" not in checker.tags
    assert "link" not in checker.tags
    assert all(address.startswith("#") for address in checker.addresses)
    assert {a[1:] for a in checker.addresses} <= set(checker.ids)
    assert len(checker.ids) == len(set(checker.ids))


def test_the_page_shows_the_run(run_dir: Path) -> None:
    text = page(run_dir)
    for words in (
        "<h1>mnist</h1>",
        "MnistMLP · mirrored · 2 replicas · run mnist-2",
        "best validation accuracy",
        "94.70%",
        "epoch 8",
        "1.4% waiting for data",
        "worker 1",
        "127.0.0.1:41874",
        "parameters: 269,322 trainable",
        "├─ hidden1  Linear",
        "steps per epoch",
        "1,500",
    ):
        assert words in text, words
    assert text.count("<svg") == 4
    assert text.count('<tr class="best">') == 1


def test_the_curves_take_their_colours_from_the_page(run_dir: Path) -> None:
    text = page(run_dir)
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert "var(--training)" in drawings
    assert "var(--validation)" in drawings
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawings)) <= {"#ffffff"}
    assert "prefers-color-scheme: dark" in text


def test_the_same_files_give_the_same_page(run_dir: Path) -> None:
    first = page(run_dir)
    assert page(run_dir) == first


@pytest.mark.parametrize(
    ("values", "options", "labels"),
    [
        ([0.5, 0.75, 1.0], {"percent": True}, ["60%", "75%", "90%"]),
        ([0.0, 3e6, 9e6], {"sizes": True}, ["2.0 MB", "8.0 MB"]),
        ([0.0, 3e6, 9e6], {}, ["2,000,000"]),
        ([1.0, 3.0, 9.0], {"log_y": True}, ["1", "2", "5"]),
    ],
)
def test_axes_have_round_numbers(
    values: list[float], options: dict[str, Any], labels: list[str]
) -> None:
    text = svg(Chart("a", "x", [Line("b", [0, 1, 2], values, NEUTRAL)], **options))
    assert {*labels} <= {*re.findall(r"<text[^>]*>([^<]*)</text>", text)}


def test_an_epoch_says_what_was_done_again(tmp_path: Path) -> None:
    epochs = [{"epoch": n + 1, "step": n, "loss": 1.0, "redone": 19 * n} for n in range(2)]
    text = page(history(tmp_path, *map(json.dumps, epochs)))
    assert '<th scope="col">done again</th>' in text
    assert "<td>19</td>" in text
    assert "done again" not in page(history(tmp_path, json.dumps(epochs[0])))


def test_what_the_user_wrote_is_escaped(run_dir: Path) -> None:
    config = json.loads((run_dir / "config.json").read_text())
    config["model"]["name"] = "<script>alert(1)</script>"
    config["model"]["summary"] = "<b>bold</b>"
    (run_dir / "config.json").write_text(json.dumps(config))
    line = {"epoch": 1, "step": 1, "loss": 1.0, "<i>m</i>": 0.5}
    text = page(history(run_dir, json.dumps(line)))
    checker = checked(text)
    assert "script" not in checker.tags
    assert "<b>bold" not in text
    assert "<i>m</i>" not in text


def test_no_epoch_yet(run_dir: Path) -> None:
    text = page(history(run_dir))
    checked(text)
    assert "No epoch has ended yet." in text
    assert "<svg" not in text
    assert "MnistMLP" in text


def test_one_epoch_has_points(run_dir: Path) -> None:
    text = page(history(run_dir, '{"epoch": 1, "step": 5, "loss": 0.5, "val_loss": 0.6}'))
    checked(text)
    assert text.count("<svg") == 1
    assert "best validation loss" in text


def test_settings_alone_and_history_alone(run_dir: Path) -> None:
    (run_dir / "history.jsonl").unlink()
    checked(page(run_dir))
    (run_dir / "config.json").unlink()
    history(run_dir, '{"epoch": 1, "step": 5, "loss": 0.5}')
    text = page(run_dir)
    checked(text)
    assert "<h1>mnist-2</h1>" in text
    assert "<h2>Cluster</h2>" not in text
    assert "<h2>Settings</h2>" not in text
    assert "final loss" in text


@pytest.mark.parametrize("config", ["", "[]", '{"cluster": {"tasks": {"worker": null}}}', "{"])
def test_settings_that_say_little(run_dir: Path, config: str) -> None:
    (run_dir / "config.json").write_text(config)
    checked(page(run_dir))


def test_values_that_are_no_numbers(tmp_path: Path) -> None:
    folder = history(
        tmp_path / "run",
        '{"epoch": 1, "step": 1, "loss": NaN, "accuracy": null, "val_loss": Infinity}',
        '{"epoch": 2, "step": 2, "loss": 0.5, "accuracy": null, "val_loss": NaN}',
        '{"epoch": 3, "step": 3, "loss": 0.4, "accuracy": null, "val_loss": 0.5, "note": "x"}',
    )
    text = page(folder)
    checked(text)
    assert "NaN" in text
    assert "∞" in text
    assert best_epoch(read_run(folder)) == (2, "val_loss")


def test_a_loss_that_is_never_a_number_draws_nothing(tmp_path: Path) -> None:
    text = page(history(tmp_path / "run", '{"epoch": 1, "step": 1, "loss": NaN}'))
    checked(text)
    assert "<svg" not in text


def test_a_line_cut_short_is_counted(run_dir: Path) -> None:
    with (run_dir / "history.jsonl").open("a") as file:
        file.write('{"epoch": 13, "st')
    text = page(run_dir)
    assert "could not be read: 1." in text
    assert len(read_run(run_dir).epochs) == 12


def test_an_epoch_that_is_done_again_counts_once(tmp_path: Path) -> None:
    lines = [json.dumps({"epoch": n, "step": 10 * n, "loss": 1 / n}) for n in (1, 2, 3, 4, 3, 4)]
    run = read_run(history(tmp_path / "run", *lines))
    assert run.axis == [1, 2, 3, 4]


def test_a_second_fit_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    lines = [
        json.dumps({"epoch": epoch, "step": 10 * number, "loss": 1 / number})
        for number, epoch in enumerate([1, 2, 1, 2, 3], start=1)
    ]
    assert read_run(history(tmp_path / "run", *lines)).axis == [1, 2, 3, 4, 5]


def test_a_loss_is_best_at_its_least_and_an_accuracy_at_its_most(tmp_path: Path) -> None:
    losses = [
        json.dumps({"epoch": n, "step": n, "val_loss": v}) for n, v in ((1, 3), (2, 1), (3, 2))
    ]
    run = read_run(history(tmp_path / "a", *losses))
    assert best_epoch(run) == (1, "val_loss")
    shares = [line.replace("val_loss", "val_accuracy") for line in losses]
    assert best_epoch(read_run(history(tmp_path / "b", *shares))) == (0, "val_accuracy")


def test_the_headline_prefers_validation(run_dir: Path) -> None:
    cards = headline(read_run(run_dir))
    assert [card.name for card in cards] == [
        "best validation accuracy",
        "final validation accuracy",
        "final validation loss",
        "training time",
        "examples per second",
    ]
    assert (cards[0].value, cards[0].more) == ("94.70%", "epoch 8")


def test_every_metric_has_its_plot(run_dir: Path) -> None:
    drawn = {chart.title: chart for chart in charts(read_run(run_dir))}
    assert list(drawn) == ["Loss", "Accuracy", "Throughput", "Waiting for data"]
    assert drawn["Accuracy"].percent
    assert drawn["Accuracy"].marked == 8  # the epoch
    assert not drawn["Loss"].percent
    assert not any(math.isnan(y) for _, y in drawn["Loss"].lines[1].points)


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} is no run folder"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="absent is no run folder"):
        write_report(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


def test_groups_that_train_apart_have_their_curves(tmp_path: Path) -> None:
    lines = [
        json.dumps(
            {
                "epoch": epoch, "loss": 1 / epoch, "loss_of_group_0": 2.0, "loss_of_group_1": 3.0,
                "meetings": 4, "drift": 0.5, "bytes_between_groups": 1000,
                "meeting_wait_fraction": 0.02,
            }
        )
        for epoch in (1, 2)
    ]  # fmt: skip
    text = page(history(tmp_path / "run", *lines))
    titles = ("Loss of each group", "Drift of the groups", "Bytes between", "Waiting for meetings")
    for words in (*titles, "group 0", "group 1"):
        assert words in text
    assert "Loss of group" not in text  # one drawing for all
    assert "Bytes between sites" not in text
    sites = (
        '{"epoch": 1, "loss": 1, "loss_of_group_0": 2, "meetings": 2, "bytes_between_groups": 9, \
"drift": 1, "meetings_of_sites": 1, "drift_of_sites": 2, "bytes_between_sites": 8}'
    )
    assert "Bytes between sites" in page(history(tmp_path / "sites", sites))
    assert "Loss of each group" not in page(history(tmp_path / "other", '{"epoch": 1, "loss": 1}'))


def test_large_whole_numbers_are_grouped(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"fit": {"examples": 10000, "epochs": 9999}}))
    text = page(tmp_path)
    assert "10,000" in text
    assert "9999" in text
