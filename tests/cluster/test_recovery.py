"""What the tasks that live do when one is lost, as it is written and read."""

from __future__ import annotations

import pytest

from spartito.cluster.recovery import Recovery
from spartito.errors import UserError


@pytest.mark.parametrize("recovery", [Recovery(), Recovery(2), Recovery(min_workers=1, wait=0.5)])
def test_what_is_written_is_read_again(recovery: Recovery) -> None:
    read = Recovery.from_environment({"SPARTITO_RECOVERY": recovery.text})
    assert read is not None
    assert (read.min_workers, read.patience) == (recovery.min_workers, recovery.patience)


def test_where_all_have_to_be_there_a_replacement_has_more_time() -> None:
    assert (Recovery().patience, Recovery(min_workers=1).patience) == (300.0, 30.0)
    assert Recovery(wait=2).patience == Recovery(min_workers=1, wait=2).patience == 2.0


def test_without_the_variable_a_lost_task_ends_the_training() -> None:
    assert Recovery.from_environment({}) is None
    assert Recovery.from_environment({"SPARTITO_RECOVERY": ""}) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("min_workers=none", "is not min_workers=N or wait=SECONDS"),
        ("patience=3", "is not min_workers=N or wait=SECONDS"),
        ("min_workers=0", "1 or more"),
        ("wait=-1", "wait=-1.0 is not a number of seconds"),
    ],
)
def test_what_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Recovery.from_environment({"SPARTITO_RECOVERY": text})
