"""What can go wrong, as a small tree; each error knows the exit code of the process it ends.

SpartitoError               1
├── UserError               2    the user's mistake: one clear message, no traceback
│   ├── CorruptSampleError  2    one example of a data set cannot be read
│   ├── MismatchedCallsError 2   replicas meet in calls that do not match
│   └── UnwritableError     2    a file or folder cannot be written: a full disk
├── TaskLostError          69    a task of the cluster did not come, or is gone
└── PreemptedError         75    the machine is taken away; all is saved, and starts again
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from spartito.names import ENV_TRACEBACK

EXIT_USER = 2
EXIT_TASK_LOST = 69
EXIT_PREEMPTED = 75
"""Of sysexits.h: a temporary failure, try again later. Launchers start such a job again."""
EXIT_INTERRUPTED = 130

PREFIX = "spartito: error: "


class SpartitoError(Exception):
    """Anything that Spartito itself raises: what happened, and what to do about it."""

    exit_code = 1

    def __init__(self, what: str, do: str = "") -> None:
        """Put the parts together.

        Args:
            what: The value that came, and the rule that it broke.
            do: What to type instead.
        """
        super().__init__(f"{what}\n  {do}" if do else what)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in a notebook: the message where that tells all."""
        if isinstance(self, UserError | TaskLostError | PreemptedError):
            return [f"{PREFIX}{self}"]
        return traceback.format_exception(self)


class UserError(SpartitoError):
    """A mistake that the user can correct; ends the process with 2 and without a traceback."""

    exit_code = EXIT_USER


class RefusedCallError(UserError, RuntimeError):
    """A call of tensors that cannot be served: a type that has no sum, another device."""


class CorruptSampleError(UserError):
    """One example of a data set cannot be read: the loader skips, counts and names it."""


class MismatchedCallsError(UserError):
    """Replicas met in different calls: no figure that came of it may be used."""


class UnwritableError(UserError):
    """A file or folder cannot be written; automatic saves wait for better times."""


class TaskLostError(SpartitoError):
    """A task of the cluster did not come within the time limit, or is gone; ends with 69."""

    exit_code = EXIT_TASK_LOST


class PreemptedError(SpartitoError):
    """Training was told to end, and saved all: the next run goes on; ends with 75."""

    exit_code = EXIT_PREEMPTED


def show(error: BaseException, in_hook: bool = False) -> int:
    """Print ``error`` as the one message its reader needs; returns the exit code.

    In an exception hook it goes to the real stderr where that is held in memory: torch's own hook
    holds it so while it calls ours, and forgets it when ours ends the process.
    """
    held = in_hook and isinstance(sys.stderr, io.StringIO)
    stream = sys.__stderr__ if held else sys.stderr
    print(f"{PREFIX}{error}", file=stream, flush=True)
    return error.exit_code if isinstance(error, SpartitoError) else 1


def brief(error: BaseException, found: TracebackType | None) -> TracebackType | None:
    """The traceback of an error in a user's model without the frames of Spartito and torch.

    Args:
        error: What was raised; another one, which has no note of ours, keeps its traceback.
        found: Its traceback.

    Returns:
        The user's own frames, and the last one, where it was raised.
    """
    notes = getattr(error, "__notes__", ())
    whole = os.environ.get(ENV_TRACEBACK, "0") not in ("", "0")
    if whole or not any("spartito:" in note for note in notes):
        return found
    frames: list[TracebackType] = []
    while found is not None:
        frames.append(found)
        found = found.tb_next
    kept = [frame for frame in frames[:-1] if not _is_inner(frame)] + frames[-1:]
    if left_out := len(frames) - len(kept):
        error.add_note(
            f"spartito: {left_out} frames of Spartito and torch are left out; "
            f"{ENV_TRACEBACK}=1 shows them"
        )
    made: TracebackType | None = None
    for frame in reversed(kept):
        made = TracebackType(made, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__traceback__ = made  # which Python's own hook prints, whatever it is given
    return made


def _is_inner(frame: TracebackType) -> bool:
    module = str(frame.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] in ("spartito", "torch")


def install_excepthook() -> None:
    """Chain ``sys.excepthook`` so that our own errors end a plain ``python script.py`` well.

    Only `UserError`, `TaskLostError` and `PreemptedError`, which was told before, are treated;
    every other exception goes to the hook that was there before. Calling it again changes nothing.
    """
    previous = sys.excepthook
    if getattr(previous, "_spartito", False):
        return

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, UserError | TaskLostError):
            # The interpreter takes the exit code from a SystemExit that its hook raises.
            raise SystemExit(show(error, in_hook=True))
        if isinstance(error, PreemptedError):
            raise SystemExit(error.exit_code)
        previous(kind, error, brief(error, traceback))

    hook._spartito = True  # type: ignore[attr-defined]
    sys.excepthook = hook


@contextmanager
def writable(directory: Path) -> Iterator[None]:
    """Turn the system's refusal into an `UnwritableError` that names the folder and the reason."""
    try:
        yield
    except OSError as error:
        raise UnwritableError(
            f"{directory} cannot be written: {error.strerror or error}",
            "Name a folder that this process may write to, with space on its disk.",
        ) from error
