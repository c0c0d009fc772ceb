"""The drawing of a pipeline's schedule: when each task computed, from the first one's begin."""

from __future__ import annotations

from typing import Any

import pytest

from spartito.report.pipeline import timeline

BUSY = (("forward", 0.0, 2.0), ("backward", 6.0, 8.0))


def task(name: str, begin: float) -> dict[str, Any]:
    return {"name": name, "actions": [[kind, 0, 0, a + begin, b + begin] for kind, a, b in BUSY]}


@pytest.mark.parametrize("begins", [(0.0, 0.0), (100.0, 100.0), (100.0, 9000.0)])
def test_a_step_is_drawn_from_its_begin_whatever_the_clocks_say(begins: tuple[float, ...]) -> None:
    found, expected = (
        timeline({"tasks": [task(f"worker {number}", begin) for number, begin in enumerate(each)]})
        for each in (begins, (0.0, 0.0))
    )
    assert found is not None
    assert expected is not None
    assert found.drawing == expected.drawing
    assert "50" in found.note
