"""Which accelerators this machine has, asked without importing torch into this process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from spartito.doctor.wording import amount
from spartito.launch.processes.gpus import listed_gpus
from spartito.system import IS_LINUX

PLUG_INS = "torch.backends"
"""The group of entry points by which other packages bring torch a kind of devices."""

OWN_PLUG_IN = "spartito_backend"
"""The module of ours in that group."""


@dataclass(frozen=True, slots=True)
class Devices:
    """What computes here beside the CPU.

    Attributes:
        names: Of each device, with its memory where that is known.
        backend: What people call the backend of ``torch.distributed`` for them, as "NCCL"; ""
            where torch has none.
        remark: Why nobody knows, "" where that is known.
    """

    names: tuple[str, ...] = ()
    backend: str = ""
    remark: str = ""


def devices(env: Mapping[str, str], torch: str, seconds: float) -> Devices:
    """The devices that a task would compute on.

    NVIDIA's are those that nvidia-smi lists. Others only torch knows, so another process asks it:
    where it is made for them, or a package brings a kind of devices.

    Args:
        env: The environment of the task.
        torch: The version that is installed.
        seconds: How long either may take.
    """
    if listed := gpu_names(env, seconds):
        return Devices(tuple(listed), "NCCL")
    if not may_know(torch, IS_LINUX, bool(of_others(entry_points(group=PLUG_INS)))):
        return Devices()
    return told(env, seconds)


def of_others(plug_ins: Iterable[EntryPoint]) -> list[EntryPoint]:
    """Those of torch's plug-ins that may bring devices: ours brings only a process group.

    Args:
        plug_ins: What installed packages have torch call.
    """
    return [point for point in plug_ins if point.module != OWN_PLUG_IN]


def may_know(torch: str, is_linux: bool, has_plug_ins: bool) -> bool:
    """Whether torch may know devices that are none of NVIDIA's.

    Args:
        torch: Its version, as "2.13.0+rocm7.1".
        is_linux: Whether this is Linux.
        has_plug_ins: Whether other packages bring devices.
    """
    build = torch.partition("+")[2]
    is_other = bool(build) and not build.startswith(("cpu", "cu"))  # the plain build is for CUDA
    return has_plug_ins or not is_linux or is_other


def told(env: Mapping[str, str], seconds: float) -> Devices:
    """What torch says in a process of its own.

    Args:
        env: The environment of the task.
        seconds: How long it may take.
    """
    asks = "from spartito.doctor.facts.devices import tell; tell()"
    try:
        ended = subprocess.run(
            [sys.executable, "-c", asks], capture_output=True, text=True, timeout=seconds, env=env
        )
        found = json.loads(ended.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Devices(
            remark=f"torch did not say within {seconds:.1f} s which devices there are: "
            f"--timeout {8 * seconds:.0f} waits longer"
        )
    except (OSError, ValueError, IndexError):
        return Devices(remark="torch could not say which devices there are: import it to see why")
    return Devices(tuple(found["names"]), found["backend"])


def tell() -> None:
    """Print what torch knows of this machine's accelerator as a line of JSON."""
    from spartito.accelerators import accelerators, group_backend

    kind, found = accelerators()
    names = [f"{name}, {amount(memory)}" if memory else name for name, memory in found]
    print(json.dumps({"names": names, "backend": (group_backend(kind) or "").upper()}), flush=True)


def gpu_names(env: Mapping[str, str], seconds: float) -> list[str]:
    """The GPUs that nvidia-smi lists; none where ``env`` hides them all.

    Args:
        env: The environment of the task.
        seconds: How long it may take.
    """
    if env.get("CUDA_VISIBLE_DEVICES", "all").strip() in {"", "-1"}:
        return []
    return [line.partition(": ")[2].partition(" (UUID")[0] for line in listed_gpus(seconds)]
