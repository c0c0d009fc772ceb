"""What one task did and needed, as a file of the run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spartito.cluster.spec import Task
from spartito.storage import write_file_atomically
from spartito.system import peak_memory

FOLDER = "tasks"


def write_record(run_dir: Path, task: Task, figures: dict[str, Any]) -> None:
    """Write ``tasks/worker-0.json``: the task's name, its peak of memory, and ``figures``."""
    found = {"task": str(task), "peak_memory_bytes": peak_memory(), **figures}
    path = run_dir / FOLDER / f"{task.type}-{task.index}.json"
    write_file_atomically(path, json.dumps(found, indent=2) + "\n")
