"""What a call of the backend raises: our errors, which are torch's `RuntimeError` too."""

from __future__ import annotations

from collections.abc import Sequence

from spartito.errors import MismatchedCallsError, TaskLostError


class DifferentCallsError(MismatchedCallsError, RuntimeError):
    """The ranks of a group are at different calls, or their tensors differ."""


class LostRankError(TaskLostError, RuntimeError):
    """A rank is gone, or did not come within the time limit of the group."""


MOST_TEXT = 4096  # bytes of `last_words`


def last_words(error: BaseException) -> bytes:
    """What a rank says to those who wait for it, before it makes no more calls."""
    kind = b"D" if isinstance(error, DifferentCallsError) else b"L"
    return (kind + str(error).encode())[:MOST_TEXT]


def heard(text: bytes) -> BaseException:
    """The error that another rank put into `last_words`."""
    what, _, do = text[1:].decode(errors="replace").partition("\n  ")
    return (DifferentCallsError if text[:1] == b"D" else LostRankError)(what, do)


def gone(names: Sequence[str], waiter: str) -> LostRankError:
    """The error of the rank ``waiter`` for ranks whose process ended, or that left."""
    who = " and ".join(names)
    return LostRankError(
        f"{who} {'is' if len(names) == 1 else 'are'} gone: the process ended, or left the "
        f"group, while {waiter} waited",
        f"Look at the last lines of {who}.",
    )


def late(names: Sequence[str], timeout: float) -> LostRankError:
    """The error for ranks that did not come within so many seconds."""
    return LostRankError(
        f"{' and '.join(names)} did not come within {timeout:g} s",
        "It may be stopped, busy elsewhere, or at another call than the others. The "
        "argument timeout of init_process_group and new_group sets the limit.",
    )
