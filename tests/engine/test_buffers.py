"""Buffers, and caches that no checkpoint has, which differ among tasks."""

from __future__ import annotations

import pytest

from spartito.collectives.collective import IdentityCollective
from tests.collectives.group import run
from tests.engine import jobs


@pytest.mark.parametrize("tasks", [2, 3])
def test_what_differs_is_named_with_the_tasks_that_are_not_as_most(tasks: int) -> None:
    odd = {"odd": [tasks - 1]}
    assert run(jobs.unlike_buffers, tasks) == [[odd, {}, {}] * 2] * tasks


def test_alone_nothing_differs() -> None:
    assert jobs.unlike_buffers(IdentityCollective()) == [{}] * 6
