"""Notes which test enters which function, in every process: it lies in the copy as a module.

`tests.mutation.trees` puts it beside the package, whose ``__init__`` imports it. What a process
enters is written at once, so that one which is killed has told it too.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

ROOT = os.path.join(os.path.dirname(__file__), "spartito", "")
FOLDER = os.path.join(os.path.dirname(__file__), "..", "entered")


def start() -> None:
    """Record from now on, in this process, its threads and its forks."""
    part = os.environ.get("PYTEST_PART", "0")
    with suppress(OSError), open(os.path.join(FOLDER, f"current-{part}"), "rb") as file:
        current = mmap.mmap(file.fileno(), 4, prot=mmap.PROT_READ)
        listed = os.path.join(FOLDER, f"entered-{part}")
        is_ours: dict[str, bool] = {}
        seen: set[tuple[str, str, bytes]] = set()

        def enter(frame: FrameType, _: str, __: Any) -> None:
            code = frame.f_code
            name = code.co_filename
            if name not in is_ours:
                is_ours[name] = name.startswith(ROOT)
            if is_ours[name]:
                found = (name, code.co_qualname, current[:4])
                if found not in seen:
                    seen.add(found)
                    number = int.from_bytes(found[2], "little")
                    line = f"{number} {name[len(ROOT) :]} {code.co_qualname}\n"
                    with suppress(OSError):
                        out = os.open(listed, os.O_WRONLY | os.O_APPEND)
                        os.write(out, line.encode())
                        os.close(out)

        sys.settrace(enter)
        threading.settrace(enter)


start()
