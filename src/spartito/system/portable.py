"""What Spartito asks of the system, by POSIX and psutil: as on macOS, which only Linux is not."""

from __future__ import annotations

import mmap
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from spartito.errors import UserError

__all__ = [
    "CGROUPS",
    "KILL_MARKED",
    "PROC",
    "STACKS_SIGNAL",
    "adopt_orphans",
    "affinity",
    "anonymous_memory",
    "cpu_and_state",
    "die_with_parent",
    "end_within",
    "file_memory",
    "forget_file",
    "give_back_memory",
    "host_key",
    "ipv4_of",
    "ipv6_addresses",
    "is_caught",
    "keep_alive_options",
    "large_pages",
    "machine_memory",
    "memory_folder",
    "peak_memory",
    "process_began",
    "process_space",
    "process_start",
    "reserve",
    "resident_memory",
    "shares_memory",
    "wake_after",
    "why_not_shared",
]

PROC = CGROUPS = Path(os.devnull, "no-such-folder")
"""Nothing is there: what reads it goes on without, as with a kernel that does not tell."""
STACKS_SIGNAL = getattr(signal, "SIGINFO", signal.SIGIO)
"""Upon it a task writes its stacks: there are no signals that nobody else uses."""
KILL_MARKED = r"""
for again in 1 2 3 4 5; do
    found=$({ ps -A -E -ww -o pid=,command= 2>/dev/null || ps axeww -o pid=,command=; } |
        awk -v mark="$mark" 'index($0, " " mark) { print $1 }')
    [ -n "$found" ] || break
    for pid in $found; do kill -s KILL "$pid"; done
done
"""
"""Lines of a shell that end all processes with ``$mark`` in their environment.

``ps`` shows it: on BSD with ``-E``, else with ``e``. macOS hides that of its own programs.
"""

_STATES = {"stopped": "T", "tracing-stop": "t", "zombie": "Z", "dead": "X"}
_BLOCK = 1 << 20


def shares_memory() -> bool:
    """Whether processes here share memory: sockets are what all systems have."""
    return False


def why_not_shared() -> str:
    """Why they do not."""
    return f"memory is shared on Linux only, and this is {_system()}"


def memory_folder() -> Path | None:
    """The folder whose files are in memory; None: there is none."""
    return None


def host_key() -> str:
    """A text for processes that can share memory: none can."""
    return f"{platform.node()}/{os.getpid()}"


def reserve(file: int, offset: int, size: int) -> None:
    """Claim the space of a part of a file: a mapping that finds its disk full ends by SIGBUS.

    What the file does not have yet is written; a hole that it has stays one.

    Args:
        file: Its descriptor.
        offset: Where the part begins.
        size: Its bytes; those that are there stay.
    """
    at = os.fstat(file).st_size
    while at < offset + size:
        at += os.pwrite(file, bytes(min(_BLOCK, offset + size - at)), at)


def large_pages(block: mmap.mmap) -> None:
    """Have memory in large pages: the system decides by itself.

    Args:
        block: The memory.
    """


def forget_file(path: str) -> None:
    """As `linux.forget_file`: nothing, as other systems have no such call."""


def give_back_memory() -> None:
    """Have the allocator give back what was freed: it does so by itself."""


def affinity() -> frozenset[int]:
    """The cores that the system may run this process on: all."""
    return frozenset(range(os.cpu_count() or 1))


def machine_memory(meminfo: Path | None = None) -> dict[str, int]:
    """The machine's memory in bytes, by Linux's names for it.

    Args:
        meminfo: A file as Linux has one; None asks this system.
    """
    if meminfo is not None:
        return {}
    found = _psutil().virtual_memory()
    return {"MemTotal": int(found.total), "MemAvailable": int(found.available)}


def anonymous_memory() -> int:
    """Bytes that this process has in use alone."""
    return int(_own().memory_full_info().uss)


def resident_memory() -> int:
    """Bytes that this process has in RAM."""
    return int(_own().memory_info().rss)


def file_memory(pid: int) -> int:
    """Bytes of files that a process has used and has in RAM: unknown, 0.

    Args:
        pid: Does not matter.
    """
    return 0


def peak_memory() -> int:
    """The most memory that this process had in RAM so far, shared pages included, in bytes."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # others count as Linux does


def process_space() -> str:
    """Where a process number counts: "", nobody can tell. A lost task's connection tells then."""
    return ""


def process_start(pid: int) -> tuple[str, int]:
    """The state of a process, and its beginning in milliseconds since 1970; 0 where unknown.

    Args:
        pid: Its number.
    """
    psutil = _psutil()
    try:
        process = psutil.Process(pid)
        return _letter(process.status()), int(1000 * process.create_time())
    except psutil.Error:
        return "", 0


def process_began() -> float:
    """When this process began, in seconds since 1970."""
    return float(_own().create_time())


def cpu_and_state(pid: int) -> tuple[float, str] | None:
    """The seconds that a process has computed, and its state as a letter of Linux.

    Args:
        pid: Its number.

    Returns:
        None where there is no such process.
    """
    psutil = _psutil()
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            spent, state = process.cpu_times(), _letter(process.status())
    except psutil.Error:
        return None
    return spent.user + spent.system, state


def is_caught(number: int) -> bool:
    """Whether a signal has a handler that Python does not know of: nobody tells.

    Args:
        number: The signal.
    """
    return False


def end_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether a child ends within some time.

    Args:
        process: The child.
        seconds: The time.
    """
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.poll() is not None


def adopt_orphans(on: bool) -> bool:
    """Whether a process of ours becomes our own child when the one that forked it ends: never.

    Args:
        on: Does not matter.
    """
    return False


def die_with_parent(parent: int | None = None) -> Callable[[], None] | None:
    """What a child runs so that it dies with its parent: nothing; the launcher's reaper ends it.

    Args:
        parent: Does not matter.
    """
    return None


def ipv4_of(interface: str) -> str:
    """The IPv4 address of a network interface, "" where it has none or there is none.

    Args:
        interface: Its name.
    """
    known = _psutil().net_if_addrs().get(interface, ())
    return next((str(one.address) for one in known if one.family == socket.AF_INET), "")


def ipv6_addresses() -> list[tuple[str, bool, str]]:
    """Each IPv6 address of this machine, whether it counts on its link alone, its interface."""
    found = []
    for name, addresses in _psutil().net_if_addrs().items():
        for one in addresses:
            if one.family == socket.AF_INET6:
                plain = str(one.address).partition("%")[0]
                found.append((plain, plain.lower().startswith("fe80:"), name))
    return found


def keep_alive_options(silence: int) -> dict[int, int]:
    """Options of TCP by which the kernel ends a connection whose other end is silent.

    Only while nothing is on its way to it: what the other end does not confirm is sent again for
    as long as the system likes.

    Args:
        silence: Seconds; of these the first half pass until it is asked, each second then.
    """
    idle = max(1, silence // 2)
    begins = "TCP_KEEPALIVE" if hasattr(socket, "TCP_KEEPALIVE") else "TCP_KEEPIDLE"
    wanted = {begins: idle, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": max(1, silence - idle)}
    return {getattr(socket, name): n for name, n in wanted.items() if hasattr(socket, name)}


def wake_after(connection: socket.socket, count: int) -> None:
    """Wake who waits for a socket when so many bytes came: it is woken with each packet.

    Args:
        connection: The socket.
        count: Bytes.
    """


def _own() -> Any:
    return _psutil().Process()


def _letter(status: str) -> str:
    return _STATES.get(status, "S")


def _system() -> str:
    return "Linux used as another system" if sys.platform == "linux" else platform.system()


def _psutil() -> Any:
    """What asks systems other than Linux; it comes with Spartito there."""
    try:
        import psutil
    except ImportError as error:
        raise UserError(
            f"on {_system()} Spartito needs psutil, which is not installed", "pip install psutil"
        ) from error
    return psutil
