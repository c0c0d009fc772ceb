"""One side of `benchmarks.thin_lines`: trains, and rank 0 writes its seconds per step to a file."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

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


def main() -> None:
    """Run the side that the command line names."""
    options = argparse.ArgumentParser()
    options.add_argument("side", choices=(*COMPRESS, *BUCKETS, "alone"))
    options.add_argument("model", choices=("mlp", "xception"))
    options.add_argument("--windows", type=int, required=True)
    options.add_argument("--steps", type=int, required=True)
    options.add_argument("--out", type=Path, required=True)
    given = options.parse_args()
    torch.set_num_threads(1)
    flush_denormals()
    work = make_work(given.model, int(os.environ["WORLD_SIZE"]))
    if given.model == "xception" and given.side in COMPRESS:
        work = replace(work, model=sp.models.CatsVsDogs())
    plan = Plan(given.windows, given.steps, "fp32")
    found = (
        ours(given.side, work, plan) if given.side in COMPRESS else plain(given.side, work, plan)
    )
    if os.environ["RANK"] == "0":
        given.out.write_text(json.dumps(found))


def ours(side: str, work: Work, plan: Plan) -> list[float]:
    """`strategy.step`, as `fit` calls it."""
    strategy = sp.MultiWorkerMirroredStrategy(compress=COMPRESS[side])
    strategy.prepare(work.model, adam(work.model))
    data = sp.data.arrays(work.x, work.y).batch(work.local_batch * strategy.num_replicas_in_sync)
    batches = iter(strategy.distribute(data.repeat()))

    def step() -> None:
        strategy.step(next(batches), work.loss)

    found = time_windows(step, plan, meet=strategy.groups.world.barrier)
    strategy.close()
    return found


def plain(side: str, work: Work, plan: Plan) -> list[float]:
    """Plain torch: DistributedDataParallel on gloo, or nobody else."""
    dist.init_process_group("gloo")
    found = time_plain(wrapped(side, work.model), work, plan)
    dist.destroy_process_group()
    return found


def wrapped(side: str, model: nn.Module) -> nn.Module:
    """The model as that side trains it; nobody may hold on to DDP when its group goes."""
    if side not in BUCKETS:
        return model
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKETS[side])


if __name__ == "__main__":
    main()
