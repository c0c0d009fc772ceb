"""Which callbacks were called where a task was lost, and which are still to be."""

from __future__ import annotations

from collections.abc import Sequence

from spartito.training.callback import Callback
from spartito.training.callbacks.csv_logger import CSVLogger
from spartito.training.callbacks.model_checkpoint import ModelCheckpoint


def keys_of(callbacks: Sequence[Callback], given: Sequence[Callback]) -> list[int]:
    """A number for each callback, in order: the same on all tasks for those that all have.

    That is the case for those that are ``given`` to `fit`.
    """
    keys, shared = [], 0
    for callback in callbacks:
        is_shared = isinstance(callback, ModelCheckpoint) or any(callback is each for each in given)
        keys.append(2 * shared + 1 if is_shared else 2 * shared)
        shared += is_shared
    return keys


def missed(
    callbacks: Sequence[Callback], keys: Sequence[int], after: int, until: int
) -> list[Callback]:
    """Those between two keys that have to be called: who keeps a state has the others' now.

    That of `CSVLogger` is how long the file is.
    """
    return [
        callback
        for callback, key in zip(callbacks, keys, strict=True)
        if after < key < until and (isinstance(callback, CSVLogger) or not callback.state_dict())
    ]
