"""One side of `benchmarks.thin_lines`, or of another: trains; rank 0 writes where its time went."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import spartito as sp
from benchmarks.common import flush_denormals
from benchmarks.jobs.plain import Work, make_work
from benchmarks.jobs.steps import Plan, adam, time_plain, time_windows

COMPRESS = {"exact": None, "bf16": "bf16", "powersgd": sp.PowerSGD(4, exact_steps=2)}
"""PowerSGD is timed compressed: two steps are exact, within the window that is not counted."""
BUCKETS = {"ddp": 25.0, "ddp 1 MB": 1.0}
STREAMED = {"at the end": 1 << 30, "beside": 1 << 20}
"""Bytes of a bucket, where an update does not find out whether buckets leave beside backward."""
EVERY = 20
LOCAL: dict[str, dict[str, Any]] = {
    "local": {"every": EVERY},
    "local 8bit": {"every": EVERY, "compress": "8bit"},
    "local 4bit": {"every": EVERY, "compress": "4bit"},
    "overlap": {"every": EVERY, "overlap": True},
    "overlap 4bit": {"every": EVERY, "overlap": 3 * EVERY // 4, "compress": "4bit"},
    "overlap long": {"every": EVERY, "overlap": EVERY - 1, "compress": "4bit"},
    "no meetings": {"every": 10**9},
}
"""local_sgd, a group on each machine; without meetings it is what computing takes."""
OURS = (*COMPRESS, *STREAMED, *LOCAL)


def main() -> None:
    """Run the side that the command line names."""
    options = argparse.ArgumentParser()
    options.add_argument("side", choices=(*OURS, *BUCKETS, "alone"))
    options.add_argument("model", choices=("mlp", "deep", "wide", "xception"))
    options.add_argument("--windows", type=int, required=True)
    options.add_argument("--steps", type=int, required=True)
    options.add_argument("--out", type=Path, required=True)
    given = options.parse_args()
    torch.set_num_threads(1)
    flush_denormals()
    work = make_work(given.model, int(os.environ["WORLD_SIZE"]))
    if given.model == "xception" and given.side in OURS:
        work = replace(work, model=sp.models.CatsVsDogs())
    plan = Plan(given.windows, given.steps, "fp32")
    train = ours if given.side in OURS else plain
    found = train(given.side, work, plan)
    if os.environ["RANK"] == "0":
        given.out.write_text(json.dumps(found))


def ours(side: str, work: Work, plan: Plan) -> dict[str, Any]:
    """`strategy.step`, as `fit` calls it; beside it the parts of the time that meetings took."""
    strategy = (
        sp.LocalSGDStrategy(groups="machine", **LOCAL[side])
        if side in LOCAL
        else sp.MultiWorkerMirroredStrategy(
            compress=COMPRESS.get(side), bucket_bytes=STREAMED.get(side)
        )
    )
    strategy.prepare(work.model, adam(work.model))
    data = sp.data.arrays(work.x, work.y).batch(work.local_batch * strategy.num_replicas_in_sync)
    batches = iter(strategy.distribute(data.repeat()))

    def step() -> None:
        strategy.step(next(batches), work.loss)

    before = iter(range(plan.windows + 1))

    def meet() -> None:
        if next(before) == 1:  # what was before is not counted
            strategy.coordination.waits(0.0, 1.0)
        strategy.engine.groups.world.barrier()

    found = time_windows(step, plan, meet)
    waits = strategy.coordination.waits(0.0, sum(found) * plan.steps)
    strategy.close()
    held = waits.get("meeting_wait_fraction", 0.0)
    return {"seconds": found, "held": held, "waited": waits.get("meeting_exchange_fraction", 0.0)}


def plain(side: str, work: Work, plan: Plan) -> dict[str, Any]:
    """Plain torch: DistributedDataParallel on gloo, or nobody else."""
    dist.init_process_group("gloo")
    found = time_plain(wrapped(side, work.model), work, plan)
    dist.destroy_process_group()
    return {"seconds": found, "held": 0.0, "waited": 0.0}


def wrapped(side: str, model: nn.Module) -> nn.Module:
    """The model as that side trains it; nobody may hold on to DDP when its group goes."""
    if side not in BUCKETS:
        return model
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKETS[side])


if __name__ == "__main__":
    main()
