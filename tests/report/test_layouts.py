"""The picture of a model on a mesh."""

from __future__ import annotations

from typing import Any

from spartito.report.layouts import MOST, layout_bars


def tensor(name: str, axes: list[Any], here: int, whole: int) -> list[Any]:
    return [name, ["hidden", "features"][: len(axes)], axes, here, whole]


def test_a_bar_is_what_a_task_has_of_a_module() -> None:
    tensors = [
        tensor("up.weight", ["model", None], 400, 800),
        tensor("up.bias", ["model"], 100, 200),
        tensor("norm.weight", [None], 250, 250),
    ]
    (bars,) = layout_bars({"mesh": {"data": 2, "model": 2}, "tensors": tensors}, "blue", "grey")
    up, norm = bars.rows
    assert (up.name, up.fraction, up.value) == ("up", 1.0, "500 B of 1.0 kB: hidden along model")
    assert up.paint == "linear-gradient(to right, blue 50.0%, grey 0)"
    assert (norm.fraction, norm.value) == (0.25, "250 B of 250 B")
    assert "data 2 x model 2" in bars.note
    assert "750 B of 1.2 kB" in bars.note


def test_small_modules_share_a_bar() -> None:
    tensors = [tensor(f"m{n}.weight", [None], n + 1, n + 1) for n in range(MOST + 5)]
    (bars,) = layout_bars({"mesh": {"model": 2}, "tensors": tensors}, "blue", "grey")
    assert len(bars.rows) == MOST + 1
    assert bars.rows[-1].value == "15 B of 15 B"
    assert layout_bars({}, "blue", "grey") == []
