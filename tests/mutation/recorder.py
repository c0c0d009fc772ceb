"""Notes which test enters which function, and comes to which of the chosen lines, in every process.

It lies in the copy as a module: `tests.mutation.trees` puts it beside the package, whose
``__init__`` imports it. What a process enters is written at once, so that one which is killed has
told it too.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

ROOT = os.path.join(os.path.dirname(__file__), "spartito", "")
FOLDER = os.path.join(os.path.dirname(__file__), "..", "entered")
PARTS = re.compile(r"(\.<locals>\.<(lambda|listcomp|setcomp|dictcomp|genexpr)>)+$")
"""What Python runs as a function of its own inside of one that has a name."""

Chosen = list[tuple[int, int, int]]
"""The first and the last line of a change, and its number."""


def start() -> None:
    """Record from now on, in this process, its threads and its forks."""
    part = os.environ.get("PYTEST_PART", "0")
    with suppress(OSError), open(os.path.join(FOLDER, f"current-{part}"), "rb") as file:
        with open(os.path.join(FOLDER, "chosen")) as lines:
            chosen: dict[str, Chosen] = json.load(lines)
        current = mmap.mmap(file.fileno(), 4, prot=mmap.PROT_READ)
        listed = os.path.join(FOLDER, f"entered-{part}")
        names: dict[Any, str] = {}
        seen: set[tuple[str, bytes]] = set()
        left: dict[tuple[str, bytes], Chosen] = {}

        def tell(what: str, now: bytes) -> None:
            if (what, now) not in seen:
                seen.add((what, now))
                with suppress(OSError):
                    out = os.open(listed, os.O_WRONLY | os.O_APPEND)
                    os.write(out, f"{int.from_bytes(now, 'little')} {what}\n".encode())
                    os.close(out)

        def enter(frame: FrameType, _: str, __: Any) -> Callable[..., Any] | None:
            code = frame.f_code
            name = names.get(code)
            if name is None:
                file, ours = code.co_filename, ""
                if file.startswith(ROOT):
                    ours = f"{file[len(ROOT) :]} {PARTS.sub('', code.co_qualname)}"
                name = names[code] = ours
            if not name:
                return None
            now = current[:4]
            tell(name, now)
            if name not in chosen:
                return None
            key = name, now
            if key not in left:
                left[key] = chosen[name]

            def come(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
                if event == "line":
                    at = frame.f_lineno
                    for first, last, number in left[key]:
                        if first <= at <= last:
                            tell(f"@ {number}", now)
                            left[key] = [one for one in left[key] if one[2] != number]
                return come if left[key] else None

            return come if left[key] else None

        sys.settrace(enter)
        threading.settrace(enter)


start()
