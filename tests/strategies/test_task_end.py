"""What others hear of the exception with which a task ends."""

from __future__ import annotations

import pytest

from spartito.errors import TaskLostError, UserError
from spartito.steps.task_end import cause, told


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UserError("what is\nwrong", "What to do."), "UserError: what is wrong"),
        (ValueError("of the user's\n  script"), "ValueError: of the user's script"),
        (SystemExit(3), "SystemExit: 3"),
        (SystemExit(0), ""),
        (SystemExit(None), ""),
        (None, ""),
    ],
)
def test_an_exception_is_told_in_one_line_without_advice(
    error: BaseException | None, said: str
) -> None:
    assert told(error) == cause(error) == said


def test_the_chief_tells_why_it_was_lost_or_interrupted_and_others_do_not() -> None:
    lost = TaskLostError("worker 1 is gone", "Look at its log.")
    assert (told(lost), cause(lost)) == ("", "worker 1 is gone")
    assert (told(KeyboardInterrupt()), cause(KeyboardInterrupt())) == ("", "it was interrupted")
