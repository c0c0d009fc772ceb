"""What one task did and needed, as a file of the run folder."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

from spartito.cluster.spec import Task
from spartito.storage import write_file_atomically

FOLDER = "tasks"


def peak_memory() -> int:
    """The most memory that this process had in RAM so far, shared pages included, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def write_record(run_dir: Path, task: Task, figures: dict[str, Any]) -> None:
    """Write ``tasks/worker-0.json``: the task's name, its peak of memory, and ``figures``."""
    found = {"task": str(task), "peak_memory_bytes": peak_memory(), **figures}
    path = run_dir / FOLDER / f"{task.type}-{task.index}.json"
    write_file_atomically(path, json.dumps(found, indent=2) + "\n")
