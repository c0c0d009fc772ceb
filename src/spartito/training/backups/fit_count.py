"""Which `fit` of a script a backup is of: counted by folder, over all trainers of the process.

A fit that is complete keeps its backups until the script ends, so that the script, started again
after a loss in a later fit, does not train it anew. A fit that was interrupted is taken up by the
next one in that folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spartito import folders
from spartito.cluster.limits import time_limit
from spartito.notes import warn
from spartito.storage.store_lock import FOLDER, HeldStore
from spartito.storage.stores import open_store

State = Literal["begun", "running", "complete", "interrupted"]

HOLDER = "fits"
"""Who holds the folders of backups in this process, to its end."""


@dataclass
class Fit:
    """One fit of this process.

    Attributes:
        number: From 1, in the order of the script.
        owner: The callback that keeps its backups.
        state: How far it came.
        remove: Removes its backups at the end of a script that ends well; None: they stay.
        folder: A folder of ours, which goes then if nothing is left in it.
    """

    number: int
    owner: object
    state: State = "begun"
    remove: Callable[[], None] | None = None
    folder: Path | None = None


_fits: dict[str, list[Fit]] = {}
_stores: dict[str, HeldStore] = {}


def hold_store(where: str, inherits: bool) -> HeldStore:
    """Have a store for this job, to the end of the script.

    Args:
        where: Its URL.
        inherits: Whether this process goes on in place of a lost one of its job.

    Raises:
        UserError: Another job has it, which is named.
    """
    if where not in _stores:
        folders.at_end(end)
        _stores[where] = HeldStore(open_store(f"{where}/{FOLDER}", time_limit() / 2), inherits)
    return _stores[where]


def take(where: str, owner: object) -> Fit:
    """The fit of ``owner`` that begins now with backups in ``where``.

    Args:
        where: A folder or URL; each counts by itself.
        owner: The callback.

    Returns:
        The one that was interrupted, if there is one, else the next.
    """
    if not _fits:
        folders.at_end(end)
    known = _fits.setdefault(where, [])
    for fit in known:
        # One that has not come to its first step by now failed before.
        again = fit.owner is owner and fit.state != "complete"
        if again or fit.state in ("begun", "interrupted"):
            fit.owner, fit.state = owner, "begun"
            return fit
    known.append(Fit(len(known) + 1, owner))
    return known[-1]


def adopt(where: str, owner: object, number: int) -> list[Fit]:
    """All fits up to that of ``number``, which runs, where another process has led them so far.

    Args:
        where: The folder or URL.
        owner: The callback, in this process.
        number: Of the running fit.

    Returns:
        Those that this process did not know, of which all but the last are complete.
    """
    if not _fits:
        folders.at_end(end)
    known = _fits.setdefault(where, [])
    new = [Fit(n, owner, "complete") for n in range(len(known) + 1, number + 1)]
    known += new
    if new:
        new[-1].state = "running"
    return new


def end() -> None:
    """The script ends: remove the backups of its fits, where all in their folder are complete."""
    known, failed = dict(_fits), getattr(sys, "last_value", None) is not None
    _fits.clear()
    for where, fits in known.items():
        if not failed and all(fit.state == "complete" for fit in fits):
            _remove(fits, _stores.get(where))
    folders.release(HOLDER)
    while _stores:
        _stores.popitem()[1].let_go()
    for folder in {fit.folder for fits in known.values() for fit in fits if fit.folder}:
        with suppress(OSError):  # something is in it
            folder.rmdir()


def _remove(fits: Sequence[Fit], held: HeldStore | None) -> None:
    try:
        if held is not None:
            held.check()
        for fit in fits:
            if fit.remove is not None:
                fit.remove()
    except Exception as error:
        warn("backups of a complete training are left: %s", error)


def forget() -> None:
    """Know of no fit, as a process that has just begun; in a fork, whose parent has them."""
    _fits.clear()
    _stores.clear()


os.register_at_fork(after_in_child=forget)
