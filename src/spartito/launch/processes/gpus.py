"""The GPUs of this machine, asked without importing torch."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from spartito.system import PROC

QUERY_SECONDS = 10.0
"""How long nvidia-smi may take to list the GPUs."""


def count_gpus(env: Mapping[str, str], proc: Path = PROC) -> int:
    """NVIDIA GPUs that a process with ``env`` sees, 0 where there are none."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    present = _present(proc)
    if visible is None or not present:
        return present
    count = 0
    for device in visible.split(","):
        if device.strip() in {"", "-1"}:  # as CUDA does: what follows an invalid entry is hidden
            break
        count += 1
    return count


def _present(proc: Path) -> int:
    listed = proc / "driver/nvidia/gpus"
    if listed.is_dir():
        return sum(1 for _ in listed.iterdir())
    return len(listed_gpus(QUERY_SECONDS))


def listed_gpus(seconds: float) -> list[str]:
    """The lines of nvidia-smi that have a GPU each; none where it cannot say.

    Args:
        seconds: How long it may take.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        printed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=seconds
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in printed.stdout.splitlines() if line.startswith("GPU ")]
