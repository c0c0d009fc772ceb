"""Which callbacks of a task that was behind the others are called for what it missed."""

from __future__ import annotations

from pathlib import Path

import spartito as sp
from spartito.training.loops.callback_catch_up import missed
from spartito.training.loops.recovering_loop import ALL


def test_who_keeps_a_state_has_seen_it_already(tmp_path: Path) -> None:
    """Counted twice, an epoch without improvement would stop this task, and so all, too soon."""
    plain, last = sp.Callback(), sp.Callback()
    stops, rows = sp.callbacks.EarlyStopping("loss"), sp.callbacks.CSVLogger(tmp_path / "rows.csv")
    callbacks, keys = [plain, stops, rows, last], [0, 1, 3, 5]
    assert missed(callbacks, keys, -1, ALL) == [plain, rows, last]
    assert missed(callbacks, keys, 0, 5) == [rows]
    assert missed(callbacks, keys, ALL, ALL) == []
