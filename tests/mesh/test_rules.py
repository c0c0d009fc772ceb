"""Each rule of the table against the plain operation, in double precision, on real processes."""

from __future__ import annotations

import pytest
import torch

from tests.mesh import jobs
from tests.replicas import Replicas

pytestmark = pytest.mark.timeout(280)

TABLES = [
    "products", "elementwise", "views", "lookups", "norms", "attention", "convolutions",
    "reductions", "joins", "losses", "randoms", "others", "multihead",
]  # fmt: skip


@pytest.mark.parametrize(
    "most", [10, pytest.param(200, marks=(pytest.mark.slow, pytest.mark.night))]
)
@pytest.mark.parametrize("what", TABLES)
def test_shards_compute_what_whole_tensors_do(replicas: Replicas, what: str, most: int) -> None:
    assert replicas(jobs.check, 2, what, {"model": 2}, most) == [[], []]


FEW = ["products", "norms"]
"""What is cut along two axes in the quick tests, which cut all along one."""


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=() if what in FEW else pytest.mark.slow) for what in TABLES]
)
def test_two_axes_cut_at_once(replicas: Replicas, what: str) -> None:
    assert replicas(jobs.check, 4, what, {"model": 2, "other": 2}, 8) == [[]] * 4


@pytest.mark.parametrize("what", ["products", "lookups", "others"])
def test_sums_that_stay_cut_by_rows(replicas: Replicas, what: str) -> None:
    assert replicas(jobs.check, 2, what, {"model": 2}, 30, 0.0) == [[], []]


def test_what_torch_does_not_ask_about_is_right_or_refused(replicas: Replicas) -> None:
    for found in replicas(jobs.checkpointed, 2):
        assert found["wrong"] == []
        assert found["gradients"] == [[[2.0, 2.0]] * 2, [[3.0, 3.0]] * 2]
        assert "a sharded tensor went into a torch.autograd.Function" in found["function"]
        assert "a sharded tensor went into a torch.autograd.Function" in found["hidden"]
        assert "use_reentrant=False" in found["reentrant"]
        assert "torch.compile asks for it" in found["memory"]
        assert found["second"]
        assert found["hook"] == (2, 4)
        assert found["several"] == [8.0]
        assert found["autocast"] == torch.bfloat16
