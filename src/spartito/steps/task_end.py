"""How a task of a job with parameter servers ends, whatever its script does about it."""

from __future__ import annotations

import atexit
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import NoReturn

from spartito import status, system
from spartito.errors import PreemptedError, SpartitoError, TaskLostError, show
from spartito.ps.job import Job
from spartito.steps.task_record import write_record

PREEMPTING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that tell a task to end soon: of Slurm, Kubernetes, clouds and launchers."""


SAME_SECONDS = 2.0
"""Within which a second SIGTERM is the first one: a launcher and its scheduler both send it."""


class Again:
    """Whether SIGTERM came before: a second one ends a process, whatever it waits for."""

    def __init__(self) -> None:
        self._first = math.inf

    def came(self, number: int) -> bool:
        """Whether ``number`` is a second SIGTERM; called for each signal."""
        now = time.monotonic()
        if number == signal.SIGTERM:
            self._first = min(self._first, now)
        return number == signal.SIGTERM and now > self._first + SAME_SECONDS


class _Told(BaseException):
    """A signal came that tells this task to end."""

    def __init__(self, number: int) -> None:
        self.number = number


def serve_and_end(job: Job, record_to: Path | None) -> NoReturn:
    """Be a server, record what it did, and end the process.

    No script goes on as a server without a trainer, not even one that catches `SystemExit` with
    all else. In a child of `multiprocessing` it is raised: there other code surrounds the script.
    """
    if multiprocessing.parent_process() is not None:
        _serve(job, record_to)
        sys.exit(0)
    code = 0
    try:
        _serve(job, record_to)
    except SpartitoError as error:
        code = show(error)
    except Exception:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(job: Job, record_to: Path | None) -> None:
    server = job.server()
    status.staleness = lambda: server.store.staleness.mean
    again = Again()

    def end(number: int, frame: FrameType | None) -> None:
        if again.came(number):
            die_of(number)
        if not server.ends_with_chief(_Told(number)):  # the chief may fetch what we have
            die_of(number)

    if current_thread() is main_thread():
        for number in PREEMPTING:
            if not is_caught(number):
                signal.signal(number, end)
    try:
        server.serve()
    except _Told as told:
        die_of(told.number)
    if record_to is not None:
        write_record(record_to, job.cluster.task, server.record())


def die_of(number: int) -> None:
    """End this process by a signal, as if it had no handler."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def is_caught(number: int) -> bool:
    """Whether somebody has a handler for it, also one that Python does not know (faulthandler)."""
    if signal.getsignal(number) not in (signal.SIG_DFL, None):
        return True
    return system.is_caught(number)


def uncaught() -> BaseException | None:
    """The exception that ends this process, when it is at its end; None in a notebook."""
    found: BaseException | None = getattr(sys, "last_value", None)
    return None if hasattr(sys, "ps1") else found


def cause(error: BaseException | None) -> str:
    """What all others should hear of an exception of the chief, without which none goes on.

    Nothing of a notice, which it publishes, nor of an end that is none of a training.
    """
    if isinstance(error, TaskLostError):
        return str(error).partition("\n")[0]
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    return told(error)


def told(error: BaseException | None) -> str:
    """What the chief should hear of an exception: not of lost tasks, interrupts and notices."""
    ends = isinstance(error, SystemExit) and error.code not in (None, 0)
    fails = isinstance(error, Exception) and not isinstance(error, TaskLostError | PreemptedError)
    what = str(error).partition("\n  ")[0] if isinstance(error, SpartitoError) else str(error)
    return f"{type(error).__name__}: {' '.join(what.split())}" if ends or fails else ""
