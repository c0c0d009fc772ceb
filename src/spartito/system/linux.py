"""What Spartito asks of the system, by what only Linux has."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import resource
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from spartito.system.fences import fences_of, why_none
from spartito.system.portable import __all__ as __all__  # the same functions
from spartito.system.texts import text_of

PROC = Path("/proc")
"""Where the kernel says what it knows; in `portable` a folder that does not exist."""
CGROUPS = Path("/sys/fs/cgroup")
STACKS_SIGNAL = signal.SIGRTMIN + 3
"""Upon it a task writes its stacks: one of those that nobody else uses."""
KILL_MARKED = r"""
for again in 1 2 3 4 5; do
    found=$(grep -lsz "^$mark\$" /proc/[0-9]*/environ)
    [ -n "$found" ] || break
    for path in $found; do path=${path#/proc/}; kill -s KILL "${path%/environ}"; done
done
"""
"""Lines of a shell that end all processes with ``$mark`` in their environment.

One of them may start another while it looks: it looks again, but not for ever.
"""

_MEMORY = Path("/dev/shm")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIOCGIFADDR = 0x8915
_LINK = "20"
"""The scope of an IPv6 address that counts on its link alone."""


def shares_memory() -> bool:
    """Whether processes here share memory: where there are fences for the processor."""
    return fences_of(platform.machine()) is not None


def why_not_shared() -> str:
    """Why they do not."""
    return why_none(platform.machine())


def memory_folder() -> Path | None:
    """The folder whose files are in memory; None where there is none."""
    return _MEMORY if _MEMORY.is_dir() else None


def host_key() -> str:
    """The same text for processes that can share memory: one kernel, one memory folder."""
    boot = PROC / "sys/kernel/random/boot_id"
    device = os.stat(_MEMORY).st_dev if _MEMORY.is_dir() else 0
    return f"{boot.read_text().strip() if boot.exists() else platform.node()}/{device}"


def reserve(file: int, offset: int, size: int) -> None:
    """Claim the space of a part of a file: a mapping that finds its disk full ends by SIGBUS.

    Args:
        file: Its descriptor.
        offset: Where the part begins.
        size: Its bytes; those that are there stay.
    """
    os.posix_fallocate(file, offset, size)


def large_pages(block: mmap.mmap) -> None:
    """Have memory that is written to from end to end in large pages.

    Args:
        block: The memory.
    """
    with suppress(OSError):  # a kernel without them
        block.madvise(mmap.MADV_HUGEPAGE)


def forget_file(path: str) -> None:
    """Have the system forget what it read of a file; what is not written yet stays.

    Args:
        path: One that is there.
    """
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def give_back_memory() -> None:
    """Have the allocator give back what was freed: glibc keeps it."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # musl has none
        libc.malloc_trim(0)


def affinity() -> frozenset[int]:
    """The cores that the system may run this process on."""
    return frozenset(os.sched_getaffinity(0))


def machine_memory(meminfo: Path | None = None) -> dict[str, int]:
    """What the kernel says of the machine's memory, in bytes, by its names for it.

    Args:
        meminfo: A file that says so; None is its own.
    """
    lines = (line.split() for line in text_of(meminfo or PROC / "meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}


def anonymous_memory() -> int:
    """Bytes that this process has in use and the system cannot reclaim; 0 if unknown."""
    for line in text_of(PROC / "self/status").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def resident_memory() -> int:
    """Bytes that this process has in RAM; 0 if unknown."""
    with suppress(IndexError, ValueError):
        return int(text_of(PROC / "self/statm").split()[1]) * mmap.PAGESIZE
    return 0


def file_memory(pid: int) -> int:
    """Bytes of files, programs and libraries among them, that a process has used and has in RAM.

    Args:
        pid: The process.

    Returns:
        They; 0 if unknown.
    """
    with suppress(IndexError, ValueError):
        return int(text_of(PROC / f"{pid}/statm").split()[2]) * mmap.PAGESIZE
    return 0


def peak_memory() -> int:
    """The most memory that this process had in RAM so far, shared pages included, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def process_space() -> str:
    """The kernel's boot and its space of process numbers, "" where nobody can tell."""
    with suppress(OSError):
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink(PROC / 'self/ns/pid')}"
    return ""


def process_start(pid: int) -> tuple[str, int]:
    """The state of a process, and its beginning in clock ticks since the boot; 0 where unknown.

    Args:
        pid: Its number.
    """
    with suppress(ValueError, IndexError):
        fields = _stat(pid)
        return fields[0], int(fields[19])
    return "", 0


def process_began() -> float:
    """When this process began, in seconds since 1970; now, where the system does not tell."""
    began = process_start(os.getpid())[1] / os.sysconf("SC_CLK_TCK")
    if not began:
        return time.time()
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - began)


def cpu_and_state(pid: int) -> tuple[float, str] | None:
    """The seconds that a process has computed, and its state as a letter of ``/proc``.

    Args:
        pid: Its number.

    Returns:
        None where there is no such process.
    """
    fields = _stat(pid)
    if not fields:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0]


def is_caught(number: int) -> bool:
    """Whether a signal has a handler that Python does not know of, as one of faulthandler.

    Args:
        number: The signal.
    """
    lines = text_of(PROC / "self/status").splitlines()
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def end_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether a child ends within some time; nothing wakes up meanwhile.

    Args:
        process: The child.
        seconds: The time.
    """
    try:
        ends = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # an old kernel
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return process.poll() is not None
    try:
        select.select([ends], [], [], seconds)
    finally:
        os.close(ends)
    return process.poll() is not None


def adopt_orphans(on: bool) -> bool:
    """Whether a process of ours becomes our own child when the one that forked it ends.

    Args:
        on: From now on, or no more.

    Returns:
        Whether the kernel does so.
    """
    code: int = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
    return code == 0


def die_with_parent(parent: int | None = None) -> Callable[[], None] | None:
    """What a child runs before its program so that the kernel kills it when its parent dies.

    Args:
        parent: The process id of the parent; we ourselves by default.
    """
    # Loaded here, before the fork: a child may do little more than call it.
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid() if parent is None else parent

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the arrangement stood
            os._exit(128 + signal.SIGKILL)

    return arrange


def ipv4_of(interface: str) -> str:
    """The IPv4 address of a network interface, "" where it has none or there is none.

    Args:
        interface: Its name.
    """
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(found[20:24])


def ipv6_addresses() -> list[tuple[str, bool, str]]:
    """Each IPv6 address of this machine, whether it counts on its link alone, its interface."""
    found = []
    for line in text_of(PROC / "net/if_inet6").splitlines():
        number, _, _, scope, _, name = line.split()
        address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))
        found.append((address, scope == _LINK, name))
    return found


def keep_alive_options(silence: int) -> dict[int, int]:
    """Options of TCP by which the kernel ends a connection whose other end is silent.

    Args:
        silence: Seconds; of these the first half pass until it is asked, each second then.
    """
    return {
        socket.TCP_KEEPIDLE: max(1, silence // 2),
        socket.TCP_KEEPINTVL: 1,
        socket.TCP_USER_TIMEOUT: 1000 * silence,
    }


def wake_after(connection: socket.socket, count: int) -> None:
    """Wake who waits for a socket when so many bytes came, and not with each packet.

    Args:
        connection: The socket.
        count: Bytes.
    """
    with suppress(OSError):  # it takes the time of who waits, and nothing else
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process behind its name; empty where there is none."""
    return text_of(PROC / str(pid) / "stat").rpartition(")")[2].split()
