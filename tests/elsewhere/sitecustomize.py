"""On the path of programs that run as on another system: what only Linux has is not there.

Names of the standard library that macOS lacks are gone, and code of ours that opens what only Linux
shows ends with an error. It is for ``SPARTITO_PORTABLE=1``: `sys.platform` stays as it is.
"""

from __future__ import annotations

import mmap
import os
import resource
import runpy
import select
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType, ModuleType

GONE: dict[ModuleType, str] = {
    mmap: "MADV_HUGEPAGE MAP_POPULATE",
    os: "copy_file_range eventfd getrandom memfd_create pidfd_open pipe2 posix_fadvise "
    "posix_fallocate sched_getaffinity sched_setaffinity splice O_DIRECT O_PATH O_TMPFILE",
    resource: "prlimit",
    select: "epoll",
    signal: "SIGRTMIN SIGRTMAX pidfd_send_signal sigtimedwait sigwaitinfo",
    socket: "TCP_KEEPIDLE TCP_USER_TIMEOUT TCP_QUICKACK TCP_CORK SOCK_CLOEXEC SOCK_NONBLOCK",
    time: "CLOCK_BOOTTIME",
}
"""Of each module, what only Linux has: names that are here are removed."""

SHOWN = ("/proc", "/sys/fs", "/dev/shm")
OURS, OTHERS = f"{os.sep}spartito{os.sep}", f"{os.sep}site-packages{os.sep}"


def opened(event: str, arguments: tuple[object, ...]) -> None:
    """Raise where code of ours opens or lists what only Linux shows; psutil may."""
    if event not in ("open", "os.listdir", "os.scandir"):
        return
    path = arguments[0]
    if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(SHOWN):
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and OTHERS not in (file := frame.f_code.co_filename):
            if OURS in file:
                raise RuntimeError(f"{file} opens {path}, which only Linux has")
            frame = frame.f_back


runpy.run_path(str(Path(__file__).parents[1] / "lean" / "sitecustomize.py"))
for module, names in GONE.items():
    for name in names.split():
        vars(module).pop(name, None)
sys.addaudithook(opened)
