"""One task of a job that saves and loads checkpoints; rank 0 prints what all found.

memory  the model is cut in four: the most bytes that a task holds beside its own part, when it
        saves, and, where a checkpoint is there, when it loads
time    one task has it whole: seconds that training is held, and that a write takes
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from torch import nn

import spartito as sp
from benchmarks.common import flush_denormals

WIDTH, LAYERS, ROWS = 4096, 5, 4
"""Five matrices of 67 MB in fp32, three times with Adam's state: 1.0 GB in all."""


def main() -> None:
    """Do what the command line names."""
    options = argparse.ArgumentParser()
    options.add_argument("what", choices=("memory", "time"))
    options.add_argument("folder", type=Path)
    options.add_argument("--saves", type=int, default=3)
    given = options.parse_args()
    torch.set_num_threads(1)
    flush_denormals()
    kept = {"memory": memory, "time": times}[given.what]
    found = kept(given.folder, given.saves)
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)


def trained(strategy: sp.Strategy) -> sp.Trainer:
    """A trainer after one step."""
    trainer = untrained(strategy)
    x = torch.rand(ROWS, WIDTH)
    trainer.fit((x, x), batch_size=ROWS, verbose=0)
    return trainer


def untrained(strategy: sp.Strategy) -> sp.Trainer:
    """A trainer whose optimizer has no state yet."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(LAYERS)]
    model = nn.Sequential(*(module for layer in layers for module in layer))
    return sp.Trainer(
        model,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-4),
        loss=nn.MSELoss(),
        strategy=strategy,
    )


def memory(folder: Path, saves: int) -> dict[str, Any]:
    """Bytes beside one's own part, at most, by task."""
    strategy = sp.MeshStrategy(model=int(os.environ["WORLD_SIZE"]))
    found: dict[str, Any] = {"tensor": 4 * WIDTH * WIDTH}
    if (folder / "sharded").exists():
        trainer = untrained(strategy)
        found["loading"] = beside(strategy, lambda: trainer.load(folder / "sharded"))
    else:
        trainer = trained(strategy)
        found["saving"] = beside(strategy, lambda: trainer.save(folder / "sharded"))
    files = [file for file in (folder / "sharded").iterdir() if file.suffix == ".safetensors"]
    found["bytes"] = sum(file.stat().st_size for file in files)
    found["files"] = len(files)
    strategy.close()
    return found


def beside(strategy: sp.Strategy, work: Callable[[], object]) -> list[int]:
    """By task, the most bytes that ``work`` holds beside what is there before or after it."""
    before = own()
    with watched() as seen:
        work()
    after = own()
    most = max([before, after, *seen]) - max(before, after)
    return [int(each) for each in strategy.gather(torch.tensor([most]))]


def own() -> int:
    """Bytes of memory that are this process's own, or shared; files that are mapped are neither.

    What was freed is given back first.
    """
    ctypes.CDLL(None).malloc_trim(0)
    return held()


def held() -> int:
    """The same, as it is."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kinds = ("RssAnon:", "RssShmem:")
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(kinds))


@contextmanager
def watched() -> Iterator[list[int]]:
    """A block in which a thread looks every millisecond at what is held."""
    seen: list[int] = []
    over = Event()

    def look() -> None:
        while not over.wait(0.001):
            seen.append(held())

    thread = Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def times(folder: Path, saves: int) -> dict[str, list[float]]:
    """Seconds of a save at once, and of what an asynchronous one holds and takes, in turns.

    The first asynchronous one, which gets its memory from the system, stands apart.
    """
    strategy = sp.strategy("mirrored")
    trainer = trained(strategy)
    found: dict[str, list[float]] = {"write": [], "held": [], "all": []}
    for _ in range(saves + 1):
        began = time.perf_counter()
        trainer.save(folder / "now")
        found["write"].append(time.perf_counter() - began)
        began = time.perf_counter()
        trainer.save(folder / "later", asynchronous=True)
        found["held"].append(time.perf_counter() - began)
        trainer.wait()
        found["all"].append(time.perf_counter() - began)
    strategy.close()
    return found


if __name__ == "__main__":
    main()
