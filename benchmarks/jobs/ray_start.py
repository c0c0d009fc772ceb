"""One side of the second race of `benchmarks.on_ray`: seconds from a call to the first step.

ours    ``sp.launch.ray`` of a function that trains with a `Trainer` under mirrored
theirs  Ray Train's ``TorchTrainer`` of the same with DistributedDataParallel on gloo

The program is connected to the cluster, and makes each call once before the clock runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

WORKERS = 2


def ours(folder: str) -> None:
    """Train one step, and write when it is done."""
    import os

    import torch

    import spartito as sp

    class FirstStep(sp.Callback):
        def on_train_batch_end(self, batch: int, logs: object) -> None:
            Path(folder, str(os.getpid())).write_text(str(time.time()))

    strategy = sp.strategy()
    model = torch.nn.Sequential(
        *(torch.nn.Linear(784, 256), torch.nn.ReLU()),
        *(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)),
    )
    trainer = sp.Trainer(
        model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=torch.nn.CrossEntropyLoss(),
        strategy=strategy,
    )
    torch.manual_seed(0)  # all tasks make the same data
    x, y = torch.rand(64, 784), torch.randint(0, 10, (64,))
    trainer.fit((x, y), batch_size=64, callbacks=[FirstStep()], verbose=False)


def theirs(config: dict[str, str]) -> None:
    """The same with torch's DDP, prepared by Ray Train."""
    import os

    import torch
    from ray.train.torch import prepare_model

    model = prepare_model(
        torch.nn.Sequential(
            *(torch.nn.Linear(784, 256), torch.nn.ReLU()),
            *(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)),
        )
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = torch.rand(32, 784), torch.randint(0, 10, (32,))
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    Path(config["folder"], str(os.getpid())).write_text(str(time.time()))


def seconds(side: str) -> float:
    """From the call until the last worker has done its first step."""
    import spartito as sp

    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        if side == "ours":
            sp.launch.ray(
                ours, strategy="mirrored", workers=WORKERS, args=(folder,), placement="spread"
            )
        else:
            from ray.train import RunConfig, ScalingConfig
            from ray.train.torch import TorchConfig, TorchTrainer

            TorchTrainer(
                theirs,
                train_loop_config={"folder": folder},
                torch_config=TorchConfig(backend="gloo"),
                scaling_config=ScalingConfig(num_workers=WORKERS, placement_strategy="SPREAD"),
                run_config=RunConfig(storage_path=folder),
            ).fit()
        ends = [float(path.read_text()) for path in Path(folder).iterdir() if path.is_file()]
    assert len(ends) == WORKERS, ends
    return max(ends) - began


def main() -> None:
    """Print the seconds of each side, in turns."""
    options = argparse.ArgumentParser()
    options.add_argument("address")
    options.add_argument("--rounds", type=int, required=True)
    given = options.parse_args()
    import ray

    ray.init(given.address, log_to_driver=False, logging_level=40)
    found: dict[str, list[float]] = {"ours": [], "theirs": []}
    for number in range(given.rounds + 1):
        for side in found if number % 2 else reversed(found):
            took = seconds(side)
            if number:
                found[side].append(took)
            print(f"{side} {took:.1f} s", file=sys.stderr, flush=True)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
