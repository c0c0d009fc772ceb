"""One side of `benchmarks.group_bytes`: rank 0 writes the bytes that it sent per step to a file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import spartito as sp
from benchmarks.common import flush_denormals
from benchmarks.jobs.lines import COMPRESS, EVERY, LOCAL
from benchmarks.jobs.plain import make_work
from benchmarks.jobs.steps import adam


def main() -> None:
    """Train for two rounds of `EVERY` steps, from meeting to meeting; the second counts."""
    options = argparse.ArgumentParser()
    options.add_argument("side", choices=(*COMPRESS, *LOCAL))
    options.add_argument("model", choices=("mlp", "xception"))
    options.add_argument("--out", type=Path, required=True)
    given = options.parse_args()
    torch.set_num_threads(1)
    flush_denormals()
    strategy = (
        sp.LocalSGDStrategy(groups=2, **LOCAL[given.side], communication="sockets")
        if given.side in LOCAL
        else sp.MultiWorkerMirroredStrategy(compress=COMPRESS[given.side], communication="sockets")
    )
    work = make_work(given.model, strategy.num_replicas_in_sync)
    strategy.prepare(work.model, adam(work.model))
    data = sp.data.arrays(work.x, work.y).batch(work.local_batch * strategy.num_replicas_in_sync)
    batches = iter(strategy.distribute(data.repeat()))
    sent = []
    for _ in range(2):
        for _ in range(EVERY):
            strategy.step(next(batches), work.loss)
        sent.append(strategy.coordination.traffic.sent)
    if strategy.is_chief:
        given.out.write_text(json.dumps((sent[1] - sent[0]) / EVERY))
    strategy.close()


if __name__ == "__main__":
    main()
