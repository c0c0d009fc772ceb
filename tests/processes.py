"""Processes for tests, forked from a server that has imported torch: milliseconds, not seconds."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from multiprocessing import forkserver, resource_tracker, util
from typing import Any
from unittest import mock

context: Any = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.server"])


def preload() -> None:
    """Import what all processes of tests need."""
    import_module("tests.preloaded")


def log_to_stderr() -> None:
    """What is logged to a stream goes where stderr is now."""
    for log in _loggers():
        for handler in log.handlers:
            if type(handler) is logging.StreamHandler:  # pytest adds some of its own
                handler.stream = sys.stderr  # `setStream` would flush the one before: it is closed


def _loggers() -> list[logging.Logger]:
    known = logging.root.manager.loggerDict.values()
    return [logging.root, *(one for one in known if isinstance(one, logging.Logger))]


def fork_server() -> None:
    """Start the server as a fork of this process, so that it has all that is imported here.

    Else it starts with the first process that is asked for, and imports what these need.
    """
    resource_tracker.ensure_running()
    with mock.patch.object(util, "spawnv_passfds", _fork):
        forkserver.ensure_running()


def _fork(_: bytes, words: Sequence[str], kept: Sequence[int]) -> int:
    """Start the Python program that ``words`` end with; it has no files but ``kept``."""
    if pid := os.fork():
        return pid
    try:
        _as_new(kept)
        exec(words[-1], {})
    except Exception:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(1)


def _caches() -> list[Any]:
    """The functions of ours that keep what they return."""
    modules = [module for name, module in sys.modules.items() if name.startswith("spartito")]
    kind = type(cache(id))
    return [found for each in modules for found in vars(each).values() if isinstance(found, kind)]


def _as_new(kept: Sequence[int]) -> None:
    """Be as a program that has just started, but for its modules: forget what they know."""
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    for log in _loggers():  # pytest adds handlers to each that has some; they write to files
        log.handlers[:] = [one for one in log.handlers if "_pytest" not in type(one).__module__]
    log_to_stderr()
    for cached in _caches():
        cached.cache_clear()
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    warnings.resetwarnings()
    warnings.simplefilter("error")
    tracker, start = resource_tracker.getfd(), 3
    assert tracker is not None
    for number in sorted({*kept, tracker}):
        os.closerange(start, number)
        start = number + 1
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))
