"""How a function's job ended: what the chief's returned, or what a task raised."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spartito.errors import (
    EXIT_INTERRUPTED,
    PreemptedError,
    SpartitoError,
    TaskLostError,
    UserError,
)
from spartito.launch.functions import task
from spartito.launch.processes.process import Failure


@dataclass
class Ending:
    """What the tasks left in the folder of the job; it is taken before the folder goes."""

    failure: Failure | None = None
    result: bytes | None = None
    error: bytes | None = None

    def take(
        self, read: Callable[[str | None, str], bytes | None], failure: Failure | None
    ) -> None:
        """Read what counts: of the chief (None), or of the task whose failure ended the job."""
        self.failure = failure
        if failure is None:
            self.result = read(None, task.RESULT)
        else:
            self.error = read(failure.task, task.error_of(failure.task))

    def result_of(self, code: int) -> Any:
        """What the chief's function returned; raises what a job with this exit code is."""
        if code == 0:
            return None if self.result is None else pickle.loads(self.result)
        raise self._error(code)

    def _error(self, code: int) -> BaseException:
        failure = self.failure
        if failure is not None and self.error is not None:
            return _raised(failure, *pickle.loads(self.error))
        what = f"{failure.task} {failure.how}\n{failure.text}" if failure else ""
        what = what.strip() or f"the job ended with exit code {code}"
        for kind in (UserError, TaskLostError, PreemptedError):
            if kind.exit_code == code:
                return kind(what)
        if code == EXIT_INTERRUPTED:
            return KeyboardInterrupt()
        return SpartitoError(what) if failure else SystemExit(code)


class TaskTraceback(Exception):
    """The traceback of an error in a task, as the cause of the error that is raised here."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def _raised(failure: Failure, found: bytes | None, text: str) -> BaseException:
    """The error of a task, with its traceback as its cause."""
    error: BaseException
    try:
        error = pickle.loads(found or b"")
    except Exception:
        error = SpartitoError(f"{failure.task} failed: {text.strip().splitlines()[-1]}")
    if isinstance(error, UserError | TaskLostError | PreemptedError):
        return error  # one message tells all
    error.add_note(f"in {failure.task}, which {failure.how}")
    error.__cause__ = TaskTraceback(text)
    error.__suppress_context__ = True
    return error
