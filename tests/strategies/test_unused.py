"""DDP searches for unused parameters only where the first update has some."""

from __future__ import annotations

import pytest
import torch

from tests.replicas import Replicas
from tests.strategies import unused_jobs as jobs


@pytest.mark.parametrize(
    ("kind", "options", "searches"),
    [
        ("never", {}, False),
        ("always", {}, True),
        ("rank", {}, True),
        ("later", {"find_unused_parameters": True}, True),
    ],
)
def test_the_first_update_tells(
    replicas: Replicas, kind: str, options: dict[str, bool], searches: bool
) -> None:
    expected = jobs.by_torch(kind)
    for found, searched, error in replicas(jobs.train, 2, kind, options):
        assert (searched, error) == (searches, "")
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def test_a_parameter_that_goes_unused_later_is_an_error(replicas: Replicas) -> None:
    for _, _, error in replicas(jobs.train, 2, "later", {}):
        assert error.startswith("parameters got no gradient in the last batch of this update")
        assert "find_unused_parameters=True" in error


def test_gradients_of_earlier_batches_do_not_hide_one_that_is_not_averaged(
    replicas: Replicas,
) -> None:
    for _, _, error in replicas(jobs.train, 2, "end", {}, 2):
        assert error.startswith("parameters got no gradient in the last batch of this update")
    expected = jobs.by_torch("end", 2)
    for found, _, error in replicas(jobs.train, 2, "end", {"find_unused_parameters": True}, 2):
        assert error == ""
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def test_batches_that_accumulate_exchange_nothing(replicas: Replicas) -> None:
    first, second = replicas(jobs.accumulating, 2)
    assert len(first) == len(second) == 4  # two of each three batches wait
    assert all(one != other for one, other in zip(first, second, strict=True))
