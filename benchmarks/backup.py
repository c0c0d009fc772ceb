"""What backups every 100 steps cost a training on one device: the MLP, or cats-vs-dogs.

Windows with and without backups take turns. Where steps are long, those with backups save more
often than that, and what one costs is related to the time of 100 steps.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import torch

import spartito as sp
from benchmarks.common import Figure, Windows, announce, conclude, flush_denormals, parser, progress
from benchmarks.jobs.plain import make_work
from benchmarks.jobs.steps import adam

WORK = {"mlp": ("mlp", 32, 4000, 100, 0.01), "cats-vs-dogs": ("xception", 8, 10, 5, None)}
"""The work, the batch, steps of a window, steps between its backups, and what they may take."""
EVERY = 100
MOST = 0.02


def main() -> None:
    """Print the fraction of its time that a training spends on backups."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=5)
    options.add_argument("--model", choices=WORK, default="mlp")
    given = options.parse_args()
    here = announce(__doc__)
    torch.set_num_threads(1)
    flush_denormals()
    windows, between = measure(given.model, given.rounds)
    plain = statistics.median(windows["plain"])
    extra = statistics.median(b - a for a, b in zip(*windows.values(), strict=True))
    every = WORK[given.model][3]
    fraction = extra * every / (plain * EVERY)
    figures = [
        Figure(f"{given.model}: backups every {EVERY} steps", fraction, MOST, "<="),
        Figure(f"{given.model}: steps to the next", between, measure="steps"),
        Figure(f"{given.model}: one backup", extra * between * 1e3, measure="ms"),
    ]
    conclude(here, figures, given.json, seconds_per_step=windows)


def measure(model: str, rounds: int) -> tuple[Windows, float]:
    """Seconds per step of each side, and steps from one backup to the next."""
    name, size, steps, every, share = WORK[model]
    work = make_work(name, 1)
    rows = torch.arange(steps * size) % len(work.x)
    chain = sp.data.arrays(work.x[rows], work.y[rows]).batch(size)
    trainer = sp.Trainer(
        work.model, optimizer=adam(work.model), loss=work.loss, strategy=sp.OneDeviceStrategy()
    )
    windows: Windows = {"plain": [], "backups": []}
    written = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(-1, rounds):  # the first warms up
            now = {}
            for side in windows if number % 2 == 0 else reversed(windows):
                backup = sp.callbacks.BackupAndRestore(folder, every=every, share=share)
                given = [backup] if side == "backups" else []
                began = time.perf_counter()
                trainer.fit(chain, epochs=1, callbacks=given, verbose=False)
                now[side] = (time.perf_counter() - began) / steps
                written += backup.written if number >= 0 and given else 0
            if number >= 0:
                for side in windows:
                    windows[side].append(now[side])
                progress(number, rounds, {k: v * 1e6 for k, v in now.items()}, "us a step")
    return windows, steps * rounds / max(1, written)


if __name__ == "__main__":
    main()
