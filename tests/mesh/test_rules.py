"""Each rule of the table against the plain operation, in double precision, on real processes."""

from __future__ import annotations

import pytest

from tests.mesh import jobs
from tests.replicas import Replicas

pytestmark = pytest.mark.timeout(120)

TABLES = [
    "products", "elementwise", "views", "lookups", "norms", "attention", "convolutions",
    "reductions", "joins", "losses", "randoms", "others", "multihead",
]  # fmt: skip


@pytest.mark.parametrize("what", TABLES)
def test_shards_compute_what_whole_tensors_do(replicas: Replicas, what: str) -> None:
    assert replicas(jobs.check, 2, what, {"model": 2}, 60) == [[], []]


@pytest.mark.parametrize("what", TABLES)
def test_two_axes_cut_at_once(replicas: Replicas, what: str) -> None:
    assert replicas(jobs.check, 4, what, {"model": 2, "other": 2}, 12) == [[]] * 4
