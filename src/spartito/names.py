"""Names that more than one package uses, and words for people: lists, sizes, times, tables."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Mapping, Sequence
from difflib import get_close_matches

ENV_STRATEGY = "SPARTITO_STRATEGY"
ENV_STRATEGY_OPTIONS = "SPARTITO_STRATEGY_OPTIONS"
ENV_RUN_DIR = "SPARTITO_RUN_DIR"
ENV_JOB = "SPARTITO_JOB"
"""By this a launcher knows all processes of a job of its own."""
ENV_TRACEBACK = "SPARTITO_TRACEBACK"
"""1: errors in a user's model show all frames, those of Spartito and torch too."""
ENV_TIMEOUT = "SPARTITO_TIMEOUT"
"""Seconds that any wait for another task may take."""
ENV_RECOVERY = "SPARTITO_RECOVERY"
"""How a training goes on when a task is lost, as ``min_workers=1,wait=30``."""
ENV_SNAPSHOT_DIR = "SPARTITO_SNAPSHOT_DIR"
"""Where a parameter server keeps its snapshots, and finds them when it is started again."""
ENV_SECRET = "SPARTITO_SECRET"
"""The secret of the job, which all its tasks know."""
ENV_SECRET_FILE = "SPARTITO_SECRET_FILE"
"""A file that holds it."""
ENV_STORE = "SPARTITO_STORE"
"""Where a launcher keeps the job's store, as ``host:port``; else the first task keeps it."""
ENV_TLS = "SPARTITO_TLS"
"""Whether tasks encrypt what they send: "on", "off"; by default where others could read it."""
ENV_PORTS = "SPARTITO_PORTS"
"""The ports that Spartito may choose from, as ``29500-29510``."""
ENV_INTERFACE = "SPARTITO_INTERFACE"
"""The network interface at which tasks listen, by its name or address."""
ENV_SHARE_DEVICES = "SPARTITO_SHARE_DEVICES"
"""Whether several tasks of a machine may compute on one device."""
ENV_MIXED = "SPARTITO_MIXED"
"""Whether tasks that update together may compute on devices of different kinds."""
ENV_HEARTBEAT = "SPARTITO_HEARTBEAT"
"""The file where a task says where it is; launchers make it."""
ENV_STACKS = "SPARTITO_STACKS"
"""A folder for the stacks of tasks that lose others, or that do not move."""
ENV_NOTICE = "SPARTITO_NOTICE"
"""Seconds after which the launcher names a task that stands still."""
ENV_FORK = "SPARTITO_FORK"
"""Set to 0, no task is forked: each is a Python of its own from its start."""
ENV_FORK_SERVER = "SPARTITO_FORK_SERVER"
"""Where a launcher that was started with a fork server finds it."""
ENV_EPOCHS = "SPARTITO_EPOCHS"
"""The number of epochs that `fit` trains, whatever the script says."""
ENV_PROFILE = "SPARTITO_PROFILE"
"""The file into which `fit` writes what a step takes, and then ends the process."""
ENV_CROWD = "SPARTITO_PROFILE_TASKS"
"""Tasks beside each other, more than there are cores, of which a step is profiled, too: "3,4"."""
ENV_RESUME = "SPARTITO_RESUME"
"""Whether a recipe goes on from what its run folder holds, as a pod that was started again does."""
ENV_CACHE = "SPARTITO_CACHE"
"""The folder in which parts of remote data are kept."""
ENV_CACHE_LIMIT = "SPARTITO_CACHE_LIMIT"
"""How much that folder may take, as 200GB."""
ENV_QUEUED_AGAIN = "SLURM_RESTART_COUNT"
"""How often Slurm has put this job into its queue again."""

PRECISIONS = {
    "16-mixed": "fp16",
    "32-true": "fp32",
    "bf16": "bf16",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16-true",
    "fp16": "fp16",
    "fp32": "fp32",
}
"""Precisions by our names and Lightning's, with ours."""
RATE, FOR_TASKS, FOR_DATA = "examples/s", "waits for tasks", "waits for data"
"""What tables call these figures, live and in reports."""
RECIPES = ("cats_vs_dogs", "gpt", "mnist")
RECIPE_SEED = 1337


def new_run_folder(recipe: str) -> str:
    """A folder for a run that begins now and has no name."""
    return f"runs/{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"


MOST_KNOWN = 24
"""So many names are listed at most where one is unknown."""


def nearest(name: object, choices: Iterable[str]) -> str:
    """What to say about an unknown ``name``: the nearest of ``choices``, then they, if few."""
    name, known = str(name), sorted(choices)
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    if len(known) <= MOST_KNOWN:
        return f"{guess}Known: {', '.join(known)}."
    close = get_close_matches(name, known, n=5, cutoff=0.3) or known[:5]
    return f"{guess}There are {len(known)}, as {', '.join(close)}."


def divisors(number: int) -> str:
    """The numbers that divide another one, for messages.

    Args:
        number: 1 or more.

    Returns:
        Them, with commas between.
    """
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def who_has(values: Mapping[str, str]) -> dict[str, list[str]]:
    """The names that have each of the values."""
    found: dict[str, list[str]] = {}
    for name, value in values.items():
        found.setdefault(value, []).append(name)
    return found


def plural(count: int, word: str, several: str = "") -> str:
    """``1 epoch``, ``2 epochs``."""
    return f"{count} {word if count == 1 else several or word + 's'}"


def listed(names: Sequence[str], most: int | None = None) -> str:
    """``a``, ``a and b``, ``a, b and c``; with more than ``most`` names ``a, b and 3 more``."""
    if most is not None and len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    return " and ".join([", ".join(names[:-1]), *names[-1:]] if len(names) > 1 else names)


def size(count: float) -> str:
    """Bytes as a person reads them: ``312 MB``, ``1.4 GB``, ``2.1 kB``."""
    for name, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:
            value = count / size
            return f"{value:.0f} {name}" if value >= 100 else f"{value:.1f} {name}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """``80 µs``, ``1.56 ms``, ``12.3 s``, ``4.5 min``, ``3.2 h``, ``12.1 days``."""
    for name, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {name}"
    for name, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * length:
            return f"{seconds / length:.3g} {name}"
    return f"{seconds * 1e6:.0f} µs"


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """The lines of a table, each column as wide as its widest word; ``right`` ones end together."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            word.rjust(width) if column in right else word.ljust(width)
            for column, (word, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
