"""``spartito report``: the page of a run as far as it has come, and who shows it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from spartito.cli import main
from spartito.cli.top import HEADS
from spartito.names import FOR_DATA, RATE
from spartito.report.page import HISTORY, REPORT


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / HISTORY).write_text('{"epoch": 1, "step": 10, "loss": 0.5}\n')
    return tmp_path


def test_it_is_written_where_something_is_newer(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / REPORT}\n"
    written = (run / REPORT).stat().st_mtime_ns
    main(["report", str(run)])
    assert (run / REPORT).stat().st_mtime_ns == written
    os.utime(run / HISTORY, ns=(written + 1, written + 1))
    main(["report", str(run)])
    assert (run / REPORT).stat().st_mtime_ns > written


def test_it_calls_figures_as_the_live_table_does(run: Path) -> None:
    figures = '"examples_per_second": 10, "data_wait_fraction": 0.1'
    (run / HISTORY).write_text(f'{{"epoch": 1, "step": 10, "loss": 0.5, {figures}}}\n')
    main(["report", str(run)])
    heads = re.findall('<th scope="col">(.*?)</th>', (run / REPORT).read_text())
    assert {RATE, FOR_DATA} <= set(heads)
    assert {RATE, FOR_DATA} <= set(HEADS)


def test_that_of_a_comparison_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "compare.html").write_text("made already")
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'compare.html'}\n"


def test_a_browser_shows_it_where_there_is_one(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen = run / "seen"
    browser = run / "browser"
    browser.write_text(f"#!/bin/sh\necho $1 > {seen}\n")
    browser.chmod(0o755)
    # The module reads the variable when it is imported: a process of its own does.
    words = [sys.executable, "-m", "spartito", "report", str(run), "--open"]
    env = {name: value for name, value in os.environ.items() if "DISPLAY" not in name}
    assert os.spawnve(os.P_WAIT, sys.executable, words, {**env, "BROWSER": f"{browser} %s"}) == 0
    assert seen.read_text().strip() == (run / REPORT).resolve().as_uri()
    assert "no browser" not in capfd.readouterr().err
    env.pop("BROWSER", None)
    assert os.spawnve(os.P_WAIT, sys.executable, words, env) == 0
    out, err = capfd.readouterr()
    assert out == f"{run / REPORT}\n"
    assert "no browser can be opened here" in err


def test_a_folder_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "is no run folder" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err
