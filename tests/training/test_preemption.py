"""A notice beside signals is what its file says, and no other."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest

from spartito.training.fitting.preemption import Preemption


class Looks(Event):
    """Ends after three looks."""

    left = 3

    def wait(self, timeout: float | None = None) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("comes", [False, True])
def test_a_file_is_a_notice_once_it_is_there(tmp_path: Path, comes: bool) -> None:
    notice = Preemption(lambda: "", source=tmp_path / "notice")
    if comes:
        (tmp_path / "notice").touch()
    notice._look(Looks())
    assert notice.text == (str(tmp_path / "notice") if comes else "")
