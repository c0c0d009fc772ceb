"""Meetings in the background, a fragment at a time: numbers are those of plain torch."""

from __future__ import annotations

import pytest

from tests.replicas import Replicas
from tests.strategies import streaming_jobs as jobs
from tests.strategies.test_contracts import close

OPTIONS = {"groups": 2, "every": 6, "fragments": 2, "overlap": 3, "mixing": 0.5}


@pytest.mark.parametrize("keeps", [False, True], ids=["torch's", "of a user"])
def test_streaming_diloco_is_that_of_plain_torch(replicas: Replicas, keeps: bool) -> None:
    """Also with an outer optimizer that goes on with the gradient which it was given."""
    expected = jobs.by_torch(6, 3, 0.5)
    for found in replicas(jobs.trained, 2, OPTIONS, keeps):
        close(found, expected)


@pytest.mark.parametrize("gone", ["first", "second"])
def test_a_layer_that_learns_no_more_leaves_its_fragment(replicas: Replicas, gone: str) -> None:
    """A fragment may have none then, and what stays has its momentum, also in another fragment."""
    all_ = [0, 1, 2, 3]
    changes = {8: all_[2:] if gone == "first" else all_[:2], 22: all_}
    expected = jobs.by_torch(6, 3, 0.5, changes)
    for found in replicas(jobs.trained, 2, OPTIONS, False, changes):
        close(found, expected)
