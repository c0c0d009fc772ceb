"""What this machine offers, asked without importing torch: GPUs, a free port."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

QUERY_SECONDS = 10.0
"""How long nvidia-smi may take to list the GPUs."""

BELOW_EPHEMERAL = range(20000, 32000)
"""Ports that no system gives to outgoing connections, so that a free one stays free."""


def gpus(env: Mapping[str, str], proc: Path = Path("/proc")) -> int:
    """NVIDIA GPUs that a process with ``env`` sees, 0 where there are none."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    present = _gpus_present(proc)
    if visible is None or not present:
        return present
    count = 0
    for device in visible.split(","):
        if device.strip() in {"", "-1"}:  # as CUDA does: what follows an invalid entry is hidden
            break
        count += 1
    return count


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of ``host`` where nobody listens now."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """``count`` different TCP ports of ``host`` where nobody listens now."""
    tried = random.sample(BELOW_EPHEMERAL, min(len(BELOW_EPHEMERAL), 50 * count))
    ports = list(islice((port for port in tried if _is_free(host, port)), count))
    with ExitStack() as held:  # all at once, so that they differ
        for _ in range(count - len(ports)):
            probe = held.enter_context(socket.socket())
            probe.bind((host, 0))
            ports.append(int(probe.getsockname()[1]))
    return ports


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _gpus_present(proc: Path) -> int:
    listed = proc / "driver/nvidia/gpus"
    if listed.is_dir():
        return sum(1 for _ in listed.iterdir())
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        answer = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=QUERY_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(1 for line in answer.stdout.splitlines() if line.startswith("GPU "))
