"""Failpoints: named lines at which a test has a process die or fail.

``SPARTITO_FAILPOINT=ps.snapshot.before_replace:kill`` ends the process there, as SIGKILL does;
``:error`` raises an `OSError` (no space left). ``:kill:3`` means the third time. Unset, a failpoint
costs one look into the environment; none is in code that runs in every step.
"""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter
from importlib import import_module
from typing import Any

from spartito.errors import UserError

ENV = "SPARTITO_FAILPOINT"

ENV_STEP_HOOK = "SPARTITO_STEP_HOOK"
"""A function ``module:name`` that gets the trainer before its first step; see `watched`."""

FAILPOINTS = {
    "storage.directory.before_manifest": "a directory is filled and has no manifest yet",
    "storage.directory.before_rename": "it is complete under its temporary name",
    "storage.directory.between_renames": "the older directory is aside, the new one not there yet",
    "storage.file.before_rename": "a file is on the disk under its temporary name",
    "storage.stream.begun": "a file of tensors has its head alone",
    "checkpoint.before_remove": "a checkpoint is written, the oldest is still to be removed",
    "ps.snapshot.before_replace": "a server's snapshot is written, the older one still counts",
    "ps.snapshot.after_replace": "the new snapshot counts",
    "ps.server.loaded": "a server has its values, and no snapshot of them yet",
    "ps.chief.before_reopen": "a restarted server was noticed, its losses are not leased again",
    "ps.worker.before_report": "all pushes of a lease are applied, its report is not sent",
    "launch.supervisor.started": "a task was started, the others may not be",
}
"""All names, and the state that a process leaves behind there."""

_hits: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Die or fail here if the environment says so."""
    wanted = os.environ.get(ENV)
    if not wanted:
        return
    which, _, rest = wanted.partition(":")
    action, _, times = rest.partition(":")
    if which not in FAILPOINTS or action not in ("kill", "error") or not (times or "1").isdigit():
        raise UserError(
            f"{ENV}={wanted} is not NAME:kill, NAME:error or NAME:kill:3",
            f"Unset it, or take one of these names: {', '.join(FAILPOINTS)}.",
        )
    if which != name:
        return
    _hits[name] += 1
    if _hits[name] < int(times or 1):
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (failpoint {name})")


def watched(trainer: Any) -> None:
    """Show ``trainer`` to the function that the environment names; unset, do nothing."""
    if wanted := os.environ.get(ENV_STEP_HOOK):
        module, _, name = wanted.partition(":")
        getattr(import_module(module), name)(trainer)
