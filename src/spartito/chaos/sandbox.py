"""A sandbox for a job: shared memory and a folder for temporary files that no other has."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spartito.launch.lines.network import Machine

HOLD = "mount -t tmpfs tmpfs /dev/shm && echo ready && exec cat"
ENTER = 'exec nsenter --target {} --mount env --chdir="$PWD" "$@"'


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Where a job runs.

    Args:
        enters: what stands before a command so that it runs there.
        memory: its /dev/shm, as it is seen from here.
        temporary: its folder for temporary files.
        machine: the machine that it is, if it has a network of its own.
    """

    enters: tuple[str, ...]
    memory: Path
    temporary: Path
    machine: Machine | None = None

    def left(self) -> list[str]:
        """The files of ours that are there."""
        ours = [f"/dev/shm/{path.name}" for path in self.memory.glob("spartito-*")]
        found = ours + [f"$TMPDIR/{path.name}" for path in self.temporary.iterdir()]
        return sorted(found)


@contextmanager
def sandbox(folder: Path) -> Iterator[Sandbox]:
    """A sandbox, gone after the block; without root's rights it shares /dev/shm with all others.

    Args:
        folder: where its temporary files are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plain = Sandbox((), Path("/dev/shm"), folder)
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        yield plain
        return
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", HOLD]
    # It ends when its input does, so not even our own violent end leaves it.
    holder = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != b"ready\n":  # a container that may not mount
            yield plain
            return
        enters = ("sh", "-c", ENTER.format(holder.pid), "sh")
        yield Sandbox(enters, Path(f"/proc/{holder.pid}/root/dev/shm"), folder)
