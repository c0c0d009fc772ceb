from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

SUMMARY = """\
Layer                      Output shape         Parameters
----------------------------------------------------------
MnistMLP                   (10,)                   269,322
├─ flatten  Flatten        (784,)                        0
├─ hidden1  Linear         (256,)                  200,960
├─ hidden2  Linear         (256,)                   65,792
└─ output   Linear         (10,)                     2,570
----------------------------------------------------------
Trainable 269,322 · not trainable 0
"""


def epochs(count: int) -> list[dict[str, Any]]:
    """Epochs of a network that learns, and overfits a little after the sixth."""
    return [
        {
            "epoch": n,
            "step": 125 * n,
            "loss": 0.08 + 0.9 * math.exp(-0.5 * n),
            "accuracy": 0.985 - 0.25 * math.exp(-0.55 * n),
            "val_loss": 0.19 + 0.7 * math.exp(-0.55 * n) + 0.006 * max(0, n - 6),
            "val_accuracy": 0.951 - 0.2 * math.exp(-0.6 * n) - 0.0012 * max(0, n - 6),
            "seconds": 1.02 + 0.06 * math.sin(n),
            "examples_per_second": 78_400 + 2_100 * math.cos(1.7 * n),
            "data_wait_fraction": 0.011 + 0.006 * math.sin(2.3 * n) ** 2,
        }
        for n in range(1, count + 1)
    ]


CONFIG: dict[str, Any] = {
    "spartito": "0.1.0",
    "torch": "2.13.0",
    "python": "3.11.2",
    "strategy": "mirrored",
    "cluster": {
        "source": "torchrun variables",
        "replicas": 2,
        "tasks": {"worker": ["127.0.0.1:41873", "127.0.0.1:41874"]},
        "threads": 1,
    },
    "model": {"name": "MnistMLP", "summary": SUMMARY, "trainable": 269322, "not_trainable": 0},
    "fit": {
        "epochs": 12,
        "batch_size": 64,
        "steps_per_epoch": 125,
        "examples": 8000,
        "precision": "fp32",
        "deterministic": False,
        "seed": 1337,
    },
    "data": {"classes": list("0123456789"), "validation_split": 0.2, "folder": None},
    "recipe": {"name": "mnist", "options": {"batch_size": 64, "epochs": 12}},
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder as a training of twelve epochs leaves it."""
    folder = tmp_path / "mnist-2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    lines = [json.dumps(epoch) for epoch in epochs(12)]
    (folder / "history.jsonl").write_text("\n".join(lines) + "\n")
    return folder
