from __future__ import annotations

import io
import os
import pty
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from spartito.errors import UserError
from spartito.training.callbacks import ProgressBar
from spartito.training.callbacks.progress_bar import Bar, Lines

LOGS = {
    "loss": 0.3123,
    "accuracy": 0.9,
    "val_loss": 0.4,
    "val_accuracy": 0.875,
    "seconds": 12.34,
    "examples_per_second": 1234.5,
    "data_wait_fraction": 0.012,
}
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Terminal:
    """A terminal of 120 columns: ``stream`` to write to, and all that was written."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.stream = open(slave, "w")  # noqa: SIM115
        self._seen = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self._master, 4096)
            except OSError:  # how a terminal says that its other end is closed
                return
            self._seen += part

    def text(self) -> str:
        """Close it and return what was written."""
        self.stream.close()
        self._reader.join(timeout=30)
        os.close(self._master)
        return self._seen.decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


class Unread(Mapping[str, float]):
    """Logs that must not be looked at."""

    def __getitem__(self, name: str) -> float:
        raise RuntimeError("read")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("read")

    def __len__(self) -> int:
        raise RuntimeError("read")


def test_an_epoch_ends_in_a_line_with_all_figures(trainer: Any) -> None:
    stream = io.StringIO()
    trainer.fit(ProgressBar(stream=stream), epochs=[LOGS, LOGS])
    assert stream.getvalue().splitlines() == [
        f"epoch {n}/2  loss 0.3123  accuracy 90.00%  val_loss 0.4000  val_accuracy 87.50%  "
        "12.3 s  1,234 examples/s  waiting for data 1.2%"
        for n in (1, 2)
    ]


def test_standard_output_is_the_default(trainer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.fit(ProgressBar(), epochs=[{"loss": 1.0}])
    assert capsys.readouterr().out == "epoch 1/1  loss 1.0000\n"


def show_at(callback: ProgressBar, clock: list[float], times: list[float]) -> None:
    """Call the hook after step 0, 1, 2, ... at these seconds."""
    for batch, clock[0] in enumerate(times):
        callback.on_train_batch_end(batch, {"loss": 0.5, "accuracy": 0.25})


@pytest.fixture
def clock() -> list[float]:
    """The seconds that the progress bar sees: its one item."""
    return [0.0]


def begin(trainer: Any, callback: ProgressBar, steps: int | None) -> None:
    trainer.steps_per_epoch, trainer.epochs = steps, 3
    callback.set_trainer(trainer)
    callback.on_train_begin()
    callback.on_epoch_begin(0)


def test_lines_come_at_most_every_five_seconds(trainer: Any, clock: list[float]) -> None:
    stream = io.StringIO()
    callback = ProgressBar(stream=stream, clock=lambda: clock[0])
    begin(trainer, callback, steps=10)
    show_at(callback, clock, [0, 1, 2, 3, 4, 5, 6, 9, 9.9, 12])
    assert stream.getvalue().splitlines() == [
        "epoch 1/3  step 6/10  loss 0.5000  accuracy 25.00%  4.0 s left  "
        "1,234 examples/s  waiting for data 1.2%",
        "epoch 1/3  step 10/10  loss 0.5000  accuracy 25.00%  0.0 s left  "
        "1,234 examples/s  waiting for data 1.2%",
    ]


def test_without_a_known_end_there_is_no_time_left(trainer: Any, clock: list[float]) -> None:
    stream = io.StringIO()
    callback = ProgressBar(stream=stream, clock=lambda: clock[0])
    begin(trainer, callback, steps=None)
    show_at(callback, clock, [0, 6])
    assert stream.getvalue().startswith("epoch 1/3  step 2  loss 0.5000  accuracy 25.00%  1,234")


def test_between_two_refreshes_nothing_is_read(trainer: Any, clock: list[float]) -> None:
    callback = ProgressBar(stream=io.StringIO(), clock=lambda: clock[0])
    begin(trainer, callback, steps=10)
    for batch in range(3):
        callback.on_train_batch_end(batch, Unread())
    clock[0] = 6
    with pytest.raises(RuntimeError, match="read"):
        callback.on_train_batch_end(3, Unread())


def test_other_replicas_show_nothing(trainer: Any, clock: list[float]) -> None:
    trainer.strategy.is_chief = False
    stream = io.StringIO()
    callback = ProgressBar(stream=stream, clock=lambda: clock[0])
    begin(trainer, callback, steps=10)
    clock[0] = 1e9
    callback.on_train_batch_end(1, Unread())
    callback.on_epoch_end(0, LOGS)
    callback.on_train_end()
    assert stream.getvalue() == ""


def test_a_bar_on_a_terminal(trainer: Any, terminal: Terminal, clock: list[float]) -> None:
    callback = ProgressBar(0.5, terminal.stream, clock=lambda: clock[0])
    begin(trainer, callback, steps=8)
    show_at(callback, clock, [0, 0.25, 0.5, 0.75, 1.0])
    callback.on_epoch_end(0, LOGS)
    callback.on_train_end()
    text = terminal.text()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "3/8" in plain
    assert "5/8" in plain
    assert "2/8" not in plain
    assert "loss 0.5000  accuracy 25.00%  0.8 s left  1,234 examples/s  waiting" in plain
    assert "epoch 1/3  loss 0.3123  accuracy 90.00%  val_loss 0.4000" in plain
    assert text.count(HIDE) == text.count(SHOW) == 1


def test_a_narrow_terminal_cuts_the_figures(
    trainer: Any, terminal: Terminal, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    callback = ProgressBar(stream=terminal.stream, clock=lambda: clock[0])
    begin(trainer, callback, steps=8)
    show_at(callback, clock, [0, 1])
    callback.on_train_end()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.text())
    assert re.search(r"epoch 1/3 \S+ 2/8 loss 0\.5000  acc", plain)
    assert "waiting" not in plain
    assert max(map(len, re.split(r"[\r\n]+", plain))) <= 60


def test_an_error_gives_the_terminal_back(
    trainer: Any, terminal: Terminal, clock: list[float]
) -> None:
    callback = ProgressBar(stream=terminal.stream, clock=lambda: clock[0])
    begin(trainer, callback, steps=8)
    show_at(callback, clock, [0, 1, 2])
    callback.on_train_error(KeyboardInterrupt())
    callback.on_train_error(KeyboardInterrupt())
    text = terminal.text()
    assert text.index(HIDE) < text.index(SHOW)
    assert text.count(SHOW) == 1


def test_a_metric_with_brackets_is_shown_as_it_is(trainer: Any, terminal: Terminal) -> None:
    trainer.fit(ProgressBar(stream=terminal.stream), epochs=[{"loss": 1.0, "top[bold]": 0.5}])
    assert "top[bold] 0.5000" in terminal.text()


def test_a_dumb_terminal_gets_lines(
    trainer: Any, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    trainer.fit(ProgressBar(stream=terminal.stream), epochs=[{"loss": 1.0}])
    assert terminal.text() == "epoch 1/1  loss 1.0000\r\n"


def test_the_displays_refresh_as_often_as_they_say() -> None:
    assert Lines(io.StringIO()).every == 5.0
    assert Bar(io.StringIO(), 0.25).every == 0.25


def test_a_refresh_must_take_time() -> None:
    with pytest.raises(UserError, match="refresh_seconds is 0"):
        ProgressBar(refresh_seconds=0)
