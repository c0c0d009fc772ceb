"""Tasks that are slowed down on purpose: what the user says, and what starts beside them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from spartito.errors import UserError
from spartito.names import nearest

FULL = 1.0
"""The share of a task that nobody slows down."""

EXAMPLE = "Write it as worker:1=0.25: worker 1 runs a quarter of the time."


def slow_tasks(texts: Iterable[str]) -> dict[str, float]:
    """The share of the time that each task of ``texts`` runs: ``["worker:1=0.25"]`` as a mapping.

    Raises `UserError` for another form, a share that is not in (0, 1], and a task named twice.
    """
    shares: dict[str, float] = {}
    for text in texts:
        task, equals, number = text.partition("=")
        if not (task and equals):
            raise UserError(f"--slow {text!r} is not a task and its share", EXAMPLE)
        if task in shares:
            raise UserError(f"--slow names {task} twice", "Give each task one share.")
        shares[task] = read_share(number)
    return shares


def read_share(text: str) -> float:
    """The share that ``text`` says; `UserError` if it is none."""
    try:
        return checked_share(float(text))
    except ValueError:
        raise UserError(f"the share {text!r} is not a number", EXAMPLE) from None


def checked_share(share: float) -> float:
    """``share`` itself; `UserError` if it is not in (0, 1]."""
    if not 0 < share <= FULL:
        raise UserError(f"the share {share:g} is not above 0 and at most 1", EXAMPLE)
    return share


def shares_of(names: Sequence[str], slow: Mapping[str, float]) -> list[float]:
    """The share of each task of ``names`` (as ``worker 1``); ``slow`` says ``worker:1``.

    Raises `UserError` for a task that is not among ``names``.
    """
    known = [name.replace(" ", ":") for name in names]
    for task, share in slow.items():
        if task not in known:
            raise UserError(
                f"{task!r} is to be slow, but is not a task that starts here", nearest(task, known)
            )
        checked_share(share)
    return [slow.get(task, FULL) for task in known]


def brake(
    pid: int, share: float, before_exec: Callable[[], None] | None
) -> subprocess.Popen[bytes]:
    """Start what lets process ``pid`` run only ``share`` of the time (see `launch.throttle`)."""
    return subprocess.Popen(
        [sys.executable, "-m", "spartito.launch.throttle", str(pid), repr(share)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=before_exec,  # safe: we have one thread
    )
