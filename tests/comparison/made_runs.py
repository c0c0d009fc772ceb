"""Comparisons made up in code: curves with a known course, a known noise and known tasks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ZIGZAG = (1, -1, 1, 1, -1, 1, -1, -1)
"""A noise that everyone can compute: up and down by the same amount."""


def history(
    epochs: int = 10,
    *,
    steps: int = 125,
    rate: float = 40_000,
    accuracy: float = 0.95,
    speed: float = 0.8,
    jump: float = 0.001,
    examples: int = 8_000,
) -> list[dict[str, Any]]:
    """Epochs that come near ``accuracy`` and jump around their course by ``jump``."""
    lines = []
    for n in range(1, epochs + 1):
        left = math.exp(-speed * n)
        shake = jump * ZIGZAG[n % len(ZIGZAG)]
        lines.append(
            {
                "epoch": n,
                "step": steps * n,
                "loss": 0.1 + 0.9 * left,
                "accuracy": accuracy + 0.03 - 0.4 * left,
                "val_loss": 0.2 + 0.8 * left + 2 * shake,
                "val_accuracy": accuracy - 0.35 * left + shake,
                "examples_per_second": rate * (1 + 0.004 * ZIGZAG[(n + 3) % len(ZIGZAG)]),
                "data_wait_fraction": 0.02,
                "seconds": examples / rate,
            }
        )
    return lines


def task(name: str, **changes: Any) -> dict[str, Any]:
    """One task's account of itself."""
    return {
        "task": name,
        "peak_memory_bytes": 390_000_000,
        "seconds": 10.0,
        "waited_for_data_seconds": 0.5,
        "waited_for_tasks_seconds": 1.0,
        "bytes_sent": 1_000_000_000,
        "bytes_received": 1_000_000_000,
        "examples": 40_000,
        "batches": 1250,
        **changes,
    }


def server(staleness: Mapping[int, int], **changes: Any) -> dict[str, Any]:
    """The account of a parameter server."""
    pushes = sum(staleness.values())
    return task(
        "ps 0",
        **{
            "examples": 32 * pushes,
            "batches": 0,
            "updates": pushes,
            "pushes": pushes,
            "staleness": {str(late): count for late, count in staleness.items()},
            "duplicates": 0,
            "lost": 0,
            **changes,
        },
    )


def workers(count: int, **changes: Any) -> list[dict[str, Any]]:
    """The accounts of ``count`` equal workers."""
    return [task(f"worker {n}", **changes) for n in range(count)]


def run(strategy: str, count: int = 2, **changes: Any) -> dict[str, Any]:
    """One run as ``compare.json`` has it."""
    trained = changes.get("history", history())
    return {
        "strategy": strategy,
        "workers": count,
        "ps": 0,
        "batch_size": 64,
        "sweep": None,
        "slow": {},
        "history": history(),
        "tasks": workers(count),
        "seconds": 9.0,
        "exit_code": 0,
        "error": None,
        "run": strategy,
        "config": {
            "strategy": strategy,
            "cluster": {"threads": 2 // count or 1, "replicas": count},
            "fit": {
                "epochs": len(trained),
                "end": "complete",
                "batch_size": 64,
                "examples": 8000,
                "seed": 1337,
            },
        },
        **changes,
    }


def record(*runs: Mapping[str, Any], goal: tuple[str, float] | None = None) -> dict[str, Any]:
    """A comparison of ``runs``."""
    return {
        "target": "mnist",
        "goal": {"name": goal[0], "value": goal[1]} if goal else None,
        "machine": {"cores": 2, "cpu": "A processor", "memory": 16_000_000_000},
        "runs": list(runs),
    }


def failed(strategy: str, error: str = "Traceback\nValueError: no luck") -> dict[str, Any]:
    """A run that ended before its first epoch."""
    return run(strategy, history=[], tasks=[], config={}, exit_code=1, error=error)


def everything() -> dict[str, Any]:
    """All strategies, a slow worker, a failure, and both sweeps."""
    slow = {"worker 1": 0.25}
    late = {0: 310, 1: 1630, 2: 420, 3: 90, 4: 12, 7: 3}
    table = [
        run("one_device", 1, history=history(rate=41_000), tasks=workers(
            1, waited_for_tasks_seconds=0.0, bytes_sent=0, bytes_received=0)),
        run("mirrored", slow=slow, history=history(rate=24_000, jump=0.0012), tasks=workers(
            2, waited_for_tasks_seconds=4.1)),
        run("multi_worker_mirrored", slow=slow, history=history(rate=23_500), tasks=workers(
            2, waited_for_tasks_seconds=6.0, bytes_sent=1_350_000_000)),
        failed("central_storage"),
        run("parameter_server", ps=1, slow=slow,
            history=history(rate=57_000, accuracy=0.948, speed=0.7, jump=0.003),
            tasks=[*workers(2, waited_for_tasks_seconds=1.2), server(late)]),
    ]  # fmt: skip
    swept = [
        run("mirrored", count, sweep="workers", run=f"mirrored-workers-{count}",
            history=history(rate=26_000 * count**0.8, speed=0.8 - 0.05 * count))
        for count in (1, 4)
    ]  # fmt: skip
    swept += [
        run(strategy, batch_size=size, sweep="batch_size", run=f"{strategy}-batch-size-{size}",
            history=history(steps=8000 // size, rate=20_000 + 4_000 * math.log2(size / 16),
                            accuracy=0.953 - 0.0045 * max(0, math.log2(size / 256)) ** 2,
                            speed=0.8 / (1 + size / 1500)))
        for strategy in ("one_device", "mirrored")
        for size in (32, 128, 512, 2048, 8192)
    ]  # fmt: skip
    return record(*table, *swept, goal=("val_accuracy", 0.94))


def write_folder(
    folder: Path, made: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]] = ()
) -> Path:
    """The run folder that a training like ``made`` leaves."""
    (folder / "tasks").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(made["config"]))
    lines = [json.dumps(epoch) for epoch in made["history"]]
    (folder / "history.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for one in made["tasks"]:
        name = one["task"].replace(" ", "-")
        (folder / "tasks" / f"{name}.json").write_text(json.dumps(one))
    if evaluations:
        lines = [json.dumps(found) for found in evaluations]
        (folder / "evaluations.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder
