"""What all benchmarks share: the machine's words, targets and ratios, and how they are printed."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from spartito.system.capacity import available_cores

Windows = dict[str, list[float]]
"""Seconds per step of each side, one entry per window."""

ENV_PLAIN = "BENCHMARK_PLAIN"
"""Set for the processes of a benchmark with ``--plain``."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value and the one to reach, in ``measure``: ``relation`` is ``>=`` or ``<=``.

    Without a target it is only shown. Ratios are "times".
    """

    name: str
    value: float
    target: float | None = None
    relation: str = ">="
    measure: str = "times"

    @property
    def reached(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if self.target is None:
            return None
        return self.value >= self.target if self.relation == ">=" else self.value <= self.target


def parser(description: str, rounds: int) -> argparse.ArgumentParser:
    """A command line with what every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--rounds", type=positive, default=rounds, help="turns of each side")
    made.add_argument("--json", action="store_true", help="print one last line of JSON")
    made.add_argument(
        "--plain",
        action=_Plain,
        default=False,
        nargs=0,
        help="leave denormals to each side, as its plain user has them",
    )
    return made


def interpreter(text: str) -> str:
    """A command line's value that names a Python, before anything is measured."""
    if shutil.which(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no program: name a Python that has it")
    return text


class _Plain(argparse.Action):
    """Tells all processes of the benchmark to leave the flag as it is."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, True)
        os.environ[ENV_PLAIN] = "1"


def flush_denormals() -> None:
    """Take denormal numbers for 0 in this thread and those that it starts, on every side.

    The first thing in each process that computes (TensorFlow does so by itself). With ``--plain``
    it does nothing: Spartito then flushes in its own training, as its users have it.
    """
    if ENV_PLAIN not in os.environ:
        import torch

        torch.set_flush_denormal(True)


def positive(text: str) -> int:
    """A count of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": _cpu_model(),
        "cores": available_cores(),
        "instructions": instructions(),
        "bf16": "native" if has_bf16() else "emulated, slow",
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


INSTRUCTIONS = {
    "AVX2": "avx2",
    "AVX-512": "avx512bw",
    "AVX-512 bf16": "avx512_bf16",
    "AMX": "amx_tile",
    "AMX bf16": "amx_bf16",
    "NEON": "asimd",
    "SVE": "sve",
    "bf16": "bf16",
}
"""The instruction sets that torch's kernels differ by, and what Linux calls them."""


def instructions() -> str:
    """Those of this CPU."""
    flags = (_cpu_info("flags") or _cpu_info("Features")).split()
    return ", ".join(name for name, flag in INSTRUCTIONS.items() if flag in flags) or "not known"


class Others:
    """How many cores others kept busy since this was made, beside our children that have ended."""

    def __init__(self) -> None:
        self._began, self._busy, self._ours = time.monotonic(), _busy_seconds(), _of_children()

    @property
    def cores(self) -> float:
        """The mean; NaN where nobody counts."""
        busy, ours = _busy_seconds() - self._busy, _of_children() - self._ours
        return max(0.0, busy - ours) / (time.monotonic() - self._began)


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _busy_seconds() -> float:
    """All cores' time but idle and waiting for a disk, as Linux counts it; NaN elsewhere."""
    counted = Path("/proc/stat")
    if not counted.exists():
        return math.nan
    ticks = [int(word) for word in counted.read_text().split("\n")[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def has_bf16() -> bool:
    """Whether the CPU computes bf16 at full speed: torch wants AVX-512 at least."""
    return "avx512bw" in _cpu_info("flags").split()


def _cpu_model() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _cpu_info(key: str) -> str:
    """What Linux says of the first core; nothing elsewhere."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def announce(title: str) -> dict[str, Any]:
    """Print the title and the machine; returns the machine."""
    here = machine()
    print(title)
    print(", ".join(f"{name} {value}" for name, value in here.items()), flush=True)
    return here


def rates(windows: Mapping[str, Sequence[float]], examples: int) -> dict[str, float]:
    """Examples per second of each side: ``examples`` per step over the median window."""
    return {side: examples / statistics.median(seconds) for side, seconds in windows.items()}


def progress(number: int, rounds: int, values: Mapping[str, float], measure: str) -> None:
    """One line when a round ends."""
    found = "  ".join(f"{side} {show(value)}" for side, value in values.items())
    print(f"round {number + 1}/{rounds}: {found}  ({measure})", flush=True)


def show(value: float) -> str:
    """A number with as many digits as one can trust."""
    if value == 0 or 1e-3 <= abs(value) < 10:
        return f"{value:.3f}"
    return f"{value:.2e}" if abs(value) < 1e-3 else f"{value:,.1f}"


def conclude(
    here: Mapping[str, Any],
    figures: Sequence[Figure],
    as_json: bool,
    **more: Any,
) -> None:
    """Print every figure with its target beside; with ``as_json`` also all of it in a line."""
    width = max(len(figure.name) for figure in figures)
    print()
    for figure in figures:
        line = f"{figure.name:<{width}}  {show(figure.value):>9}"
        if figure.target is not None:
            verdict = "reached" if figure.reached else "missed"
            line += f"   target {figure.relation} {figure.target:g}: {verdict}"
        print(line)
    if as_json:
        found = [{**asdict(figure), "reached": figure.reached} for figure in figures]
        print(json.dumps({"machine": here, "figures": found, **more}))
