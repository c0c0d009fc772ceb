"""Processes for tests, forked from a server that has imported torch: milliseconds, not seconds."""

from __future__ import annotations

import multiprocessing
from typing import Any

context: Any = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.preloaded"])
