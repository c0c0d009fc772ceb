"""Gradients on thin lines: replicas stay equal, nothing is lost for good, and checkpoints go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import spartito as sp
from tests.replicas import Replicas
from tests.strategies import overlap_jobs as jobs

EVERY = [("sockets", 3), ("layers", 4), ("process_group", 2), ("ddp", 2)]
"""ddp: the engine of GPUs, here on gloo."""

KINDS: dict[str, Any] = {
    "bf16": "bf16",
    "8bit": "8bit",
    "4bit": "4bit",
    "topk": "topk:0.2",
    "powersgd": sp.PowerSGD(2, 3),
}


@pytest.mark.parametrize(("way", "size"), EVERY)
@pytest.mark.parametrize("compress", KINDS.values(), ids=KINDS)
def test_replicas_stay_equal_and_near_the_exact_training(
    replicas: Replicas, way: str, size: int, compress: Any
) -> None:
    exact = replicas(jobs.compressed, size, way, None)[0]
    first, *others = replicas(jobs.compressed, size, way, compress)
    assert first["early"] > 0 or way in ("process_group", "ddp")
    for other in others:
        for name, value in first["weights"].items():
            assert torch.equal(other["weights"][name], value), name
    if way != "ddp":  # what DDP sends by itself is not counted
        assert first["sent"] < 0.8 * exact["sent"]
    assert exact["error"] == 0
    assert 0 < first["error"] < (0.01 if compress == "bf16" else 1.2)
    for name, value in first["weights"].items():
        assert not torch.equal(value, exact["weights"][name])
        torch.testing.assert_close(value, exact["weights"][name], rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("way", "size"), [*EVERY, ("ddp", 3)])
def test_what_a_step_leaves_out_comes_later(replicas: Replicas, way: str, size: int) -> None:
    for given, applied, kept in replicas(jobs.products, size, way):
        assert torch.linalg.matrix_rank(applied) <= 3  # a product of rank 1 in each of 3 updates
        assert kept.norm() > 0.1 * given.norm()
        torch.testing.assert_close(applied + kept, given, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("way", "size"), EVERY)
def test_a_checkpoint_goes_on_in_bits(
    replicas: Replicas, way: str, size: int, tmp_path: Path
) -> None:
    compress, folder = sp.PowerSGD(2, 3), str(tmp_path / "rest")
    whole = replicas(jobs.compressed, size, way, compress)
    replicas(jobs.compressed, size, way, compress, folder, "save")
    resumed = replicas(jobs.compressed, size, way, compress, folder, "resume")
    for one, other in zip(whole, resumed, strict=True):
        for name, value in one["weights"].items():
            assert torch.equal(other["weights"][name], value), name
    # Under another number of machines their sum is what it was.
    before = replicas(jobs.left_out, size, way, folder)[0]
    after = replicas(jobs.left_out, 2 if way != "ddp" else 3, "sockets", folder)[0]
    assert len(before) == 3
    for one, other in zip(before, after, strict=True):
        assert one.norm() > 0
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("way", ["sockets", "ddp"])
def test_going_back_forgets_what_was_left_out(replicas: Replicas, way: str, tmp_path: Path) -> None:
    compress, folder = sp.PowerSGD(2, 12), str(tmp_path / "exact")  # 10 steps are in it
    replicas(jobs.compressed, 2, way, compress, folder, "save")
    fresh, again = (replicas(jobs.compressed, 2, way, compress, folder, p)[0]["weights"]
                    for p in ("resume", "again"))  # fmt: skip
    for name, value in fresh.items():
        assert torch.equal(again[name], value), name


@pytest.mark.parametrize("accumulate", [1, 3])
def test_ddp_weighs_uneven_batches_exactly(replicas: Replicas, accumulate: int) -> None:
    exact, _ = replicas(jobs.uneven, 3, "sockets", None, accumulate)[0]
    for compress, near in ((sp.PowerSGD(2, 1000), 1e-12), ("bf16", 0.01), (sp.PowerSGD(2, 2), 0.1)):
        (first, error), *others = replicas(jobs.uneven, 3, "ddp", compress, accumulate)
        assert error == 0 if near == 1e-12 else error > 0 or accumulate > 1  # of each 16th update
        for name, value in first.items():
            torch.testing.assert_close(value, exact[name], rtol=0, atol=near)
            assert all(torch.equal(other[name], value) for other, _ in others)


def test_what_cannot_be_compressed_is_refused(replicas: Replicas) -> None:
    said = replicas(jobs.refused, 2, "powersgd", deterministic=True)
    said += replicas(jobs.refused, 2, "bf16", deterministic=True)
    assert all("with deterministic=True" in text for text in said)
    (text, _) = replicas(jobs.refused, 2, "powersgd", precision="fp16")
    assert "precision='fp16', whose loss scale changes" in text
    for wrong in ("topk:2", "powersgd:", "powersgd:0", "powersgd:-1", "bf16:2", 4):
        (text, _) = replicas(jobs.refused, 2, wrong)
        assert str(wrong) in text or "rank=0" in text
    assert replicas(jobs.refused, 2, "bf16", "auto") == ["", ""]  # one machine: said, and left out
