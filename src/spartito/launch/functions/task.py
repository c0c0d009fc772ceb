"""A task that calls a function: ``python -m spartito.launch.functions.task FOLDER``.

The folder has the call; what the chief's returns goes there, and what a task raises.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle

from spartito.cluster import resolve
from spartito.cluster.spec import Task
from spartito.errors import UserError
from spartito.launch.functions.call import culprit, name_of, unpacked

CALL, RESULT = "call", "result"

is_task = False
"""Whether this process is a task that calls a function."""


def error_of(task: str) -> str:
    """The file where a task leaves what it raised."""
    return f"error-{task.replace(' ', '-')}"


def main(argv: Sequence[str]) -> None:
    """Call what the folder has; the first word of ``argv`` names it."""
    global is_task
    is_task, folder = True, Path(argv[0])
    cluster = resolve(os.environ)
    try:
        function, args, kwargs = unpacked((folder / CALL).read_bytes())
        result = function(*args, **kwargs)
        if cluster.is_chief:
            _write(folder / RESULT, _bytes_of(result, name_of(function)))
    except Exception as error:
        _fail(folder, cluster.task, error)


def _bytes_of(result: Any, name: str) -> bytes:
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:
        where, _ = culprit({f"what {name} returned": result})
        raise UserError(
            f"{where} cannot be sent back: {error}", "Return figures, tensors or a state dict."
        ) from error


def _fail(folder: Path, task: Task, error: Exception) -> None:
    """Leave the error for the launcher, and end as a script would that raises it."""
    own = error.__traceback__ and error.__traceback__.tb_next  # from the function on
    error.__traceback__ = own
    text = "".join(traceback.format_exception(error))
    found: bytes | None = None
    with suppress(Exception):
        found = cloudpickle.dumps(error)
        pickle.loads(found)  # some exceptions can be sent, but not received
    with suppress(OSError):
        _write(folder / error_of(str(task)), pickle.dumps((found, text)))
    raise error


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


if __name__ == "__main__":
    from spartito.launch.functions.task import (
        main as run,  # what is sent may have a 'main' of its own
    )

    run(sys.argv[1:])
