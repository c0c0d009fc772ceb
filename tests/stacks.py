"""Where processes stand: each child of a test dumps the stacks of all its threads when asked."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

SIGNAL = signal.SIGRTMAX  # nobody else uses it
FILE = "SPARTITO_TEST_STACKS"
"""The variable with the file that forked children write to.

Programs (`tests.commands`) write to their stderr: lean/sitecustomize.py.
"""

LIMIT = 5.0
QUIET = 0.2  # seconds without a new line: the dump is complete


def register() -> None:
    """Let this process and its forks dump their stacks into the file of the test process."""
    if FILE not in os.environ:  # no test started us
        return
    descriptor = os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND)
    faulthandler.enable(descriptor)
    faulthandler.register(SIGNAL, descriptor)


def written() -> str:
    """All that children have written so far, fatal errors among it."""
    file = os.environ.get(FILE)
    return Path(file).read_text() if file and Path(file).exists() else ""


def of(processes: Mapping[str, int]) -> str:
    """The stacks of forked children, by their names."""
    found = []
    for name, pid in processes.items():
        before = len(written())
        if not ask([pid]):
            found.append(f"{name} (pid {pid}) has ended or shows no stacks")
            continue
        text, end = "", time.monotonic() + LIMIT
        while time.monotonic() < end:
            time.sleep(QUIET)
            if text and text == written()[before:]:
                break
            text = written()[before:]
        found.append(f"{name} (pid {pid}):\n{text}")
    return "\n".join(found)


def ask(pids: Iterable[int]) -> list[int]:
    """Ask those of ``pids`` that can to dump their stacks; returns which were asked."""
    asked = [pid for pid in pids if _catches(pid)]
    for pid in asked:
        os.kill(pid, SIGNAL)
    return asked


def descendants(pid: int) -> list[int]:
    """The children of ``pid``, their children, and so on."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (status := _status(int(folder.name))):
            parents.setdefault(int(status["PPid"]), []).append(int(folder.name))
    found, seen = [], [pid]
    while seen:
        children = parents.get(seen.pop(), [])
        found += children
        seen += children
    return found


def _catches(pid: int) -> bool:
    """Whether ``pid`` is a Python that has registered the signal; others would die of it."""
    status = _status(pid)
    handled = int(status.get("SigCgt", "0"), 16) >> (SIGNAL - 1) & 1
    return bool(handled) and status["Name"].startswith(("python", "pytest", "spartito"))


def _status(pid: int) -> dict[str, str]:
    """What the kernel says of ``pid``; nothing of one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
