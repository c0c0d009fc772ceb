"""Reads data that lies elsewhere: python -m benchmarks.jobs.stored train|stream|first URL ...

Prints one line of JSON. The cache is that of the environment.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common import flush_denormals

BATCH = 32
BLOCKS = 16


def train(url: str, count: int) -> dict[str, Any]:
    """One epoch of cats-vs-dogs: images per second, the first batch included."""
    import spartito as sp

    torch.manual_seed(0)
    net = sp.models.CatsVsDogs()
    photos = sp.data.image_folder(url).shuffle().batch(BATCH)
    trainer = sp.Trainer(
        net, optimizer=torch.optim.Adam(net.parameters()), loss=nn.BCEWithLogitsLoss(), seed=0
    )
    warm = torch.zeros(BATCH, 3, 180, 180), torch.zeros(BATCH, dtype=torch.int64)
    trainer.fit(warm, epochs=1, batch_size=BATCH, verbose=False)
    began = time.perf_counter()
    history = trainer.fit(photos, epochs=2, initial_epoch=1, verbose=False)
    seconds = time.perf_counter() - began
    return {"rate": count / seconds, "loss": history.history["loss"][-1]}


def stream(url: str, count: int) -> dict[str, Any]:
    """A pass over packed data: seconds, a checksum of the order, the highest memory."""
    import spartito as sp

    before = highest()
    began = time.perf_counter()
    found = sp.data.packed(url, ("x", "y")).shuffle(1, blocks=BLOCKS).batch(64)
    order = 0
    for _, y in found:
        for each in y.tolist():
            order = (order * 31 + each) % (2**61 - 1)
        count -= len(y)
    assert count == 0, f"{count} examples are missing"
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "order": order, "grown": highest() - before}


def highest() -> float:
    """The most memory that this process had so far, MiB: of its own, not of who started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def first(url: str, count: int) -> dict[str, Any]:
    """Seconds until the first batch of packed data is there."""
    import spartito as sp

    began = time.perf_counter()
    found = sp.data.packed(url, ("x", "y"))
    opened = time.perf_counter() - began
    assert len(found.source) == count  # type: ignore[arg-type]
    next(iter(found.shuffle(1, blocks=BLOCKS).batch(64)))
    return {"seconds": time.perf_counter() - began, "opened": opened}


def main() -> None:
    """See above."""
    options = argparse.ArgumentParser()
    options.add_argument("what", choices=["train", "stream", "first"])
    options.add_argument("url")
    options.add_argument("count", type=int)
    given = options.parse_args()
    flush_denormals()
    torch.set_num_threads(1)
    what = {"train": train, "stream": stream, "first": first}[given.what]
    print(json.dumps(what(given.url, given.count)))


if __name__ == "__main__":
    main()
