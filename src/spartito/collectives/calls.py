"""Call tags: every exchange between replicas carries the call that it is part of, in one number.

    | purpose 5 bits | operation 4 | dtype 5 | index 10 | of the CPU 1 | elements 38 |

Replicas compare the tags as they synchronize, which costs no exchange of its own. Each can read the
other's number, so that the error names both tasks and both calls.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from spartito.errors import MismatchedCallsError

OPERATIONS = (
    "no call",
    "all_reduce",
    "all_gather",
    "broadcast",
    "barrier",
    "reduce",
    "new reducer",
    "gather of rows",
    "gather of bytes",
    "shared memory",
    "copies of shards",
    "reduce_scatter",
    "all_to_all",
    "send",
)
PURPOSES = (
    "",
    "prepare",
    "step",
    "update",
    "end of epoch",
    "evaluate",
    "predict",
    "save",
    "load",
    "reduce",
    "gather",
    "data",
    "parameter without its module",
    "close",
)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
BY_ALL = ("prepare", "evaluate", "predict", "save", "load", "reduce", "gather")
"""Purposes that are calls of the user's."""
_OPERATION = {name: code for code, name in enumerate(OPERATIONS)}
_PURPOSE = {name: code for code, name in enumerate(PURPOSES)}
_DTYPE = {dtype: code for code, dtype in enumerate(DTYPES)}
_OTHER = 31  # a dtype that is not in the table
_NUMEL, _INDEX = (1 << 38) - 1, (1 << 10) - 1
OF_CPU = 1 << 38
"""In the number of a call: it moves tensors of the CPU, in a group that works on a device."""


def code_of(dtype: torch.dtype | None) -> int:
    """The number of a dtype, the same one for all that are not in the table."""
    return _DTYPE.get(dtype, _OTHER)  # type: ignore[arg-type]


def dtype_of(code: int) -> torch.dtype | None:
    """The dtype of a number, None for one that is not in the table."""
    return DTYPES[code] if code < len(DTYPES) else None


def encode(operation: str, numel: int, dtype: torch.dtype | None, index: int = 0) -> int:
    """A call as a number of 63 bits, without its purpose.

    ``index`` is the source of a broadcast, or which of the reducers it is.
    """
    kind = _OPERATION[operation] << 5 | code_of(dtype)
    return (kind << 10 | index & _INDEX) << 39 | min(numel, _NUMEL)


def describe(tag: int) -> str:
    """The call in words, as ``reduce of 269322 float32 [step]``."""
    operation, code = OPERATIONS[tag >> 54 & 15], tag >> 49 & 31
    index, numel = tag >> 39 & _INDEX, tag & _NUMEL
    dtype = str(dtype_of(code) or "").removeprefix("torch.")
    size = f" of {numel} {dtype or 'elements'}" if numel or dtype else ""
    size += " of the CPU" if tag & OF_CPU else ""
    which = f" from rank {index}" if operation == "broadcast" else f" by reducer {index}"
    purpose = PURPOSES[tag >> 58]
    return f"{operation}{size}{which if index else ''}{f' [{purpose}]' if purpose else ''}"


def waiting_in(tag: int) -> str:
    """A sentence that names the call in which a task has waited in vain."""
    if not tag:
        return ""
    purpose = PURPOSES[tag >> 58]
    everybody = f" All tasks call {purpose}, not the chief alone." if purpose in BY_ALL else ""
    return f"This task is at {describe(tag)}.{everybody} "


@dataclass(slots=True)
class CurrentCall:
    """What this replica is at: the outermost call that runs, and what the calls are for."""

    tag: int = 0
    purpose: int = 0

    def call(self, tag: int) -> _Call:
        """A block at the call of this number; one inside of another is a part of it."""
        return _Call(self, tag)

    @contextmanager
    def marked(self, mark: int) -> Generator[None]:
        """A block in which ``mark`` is part of the call that runs."""
        before = self.tag
        self.tag |= mark
        try:
            yield
        finally:
            self.tag = before

    def during(self, purpose: str) -> _During:
        """For a block, calls are for ``purpose``, unless they are for something already."""
        return _During(self, _PURPOSE[purpose])


class _During:
    """The block of `CurrentCall.during`, which every step has twice."""

    __slots__ = ("_before", "_current", "_purpose")

    def __init__(self, current: CurrentCall, purpose: int) -> None:
        self._current, self._purpose = current, purpose

    def __enter__(self) -> None:
        current = self._current
        self._before = current.purpose
        current.purpose = self._before or self._purpose

    def __exit__(self, *error: object) -> None:
        self._current.purpose = self._before


class _Call:
    """The block of `CurrentCall.call`: a generator would take three times as long."""

    __slots__ = ("_before", "_current", "_tag")

    def __init__(self, current: CurrentCall, tag: int) -> None:
        self._current, self._tag = current, tag

    def __enter__(self) -> None:
        current = self._current
        self._before = current.tag
        current.tag = self._before or current.purpose << 58 | self._tag

    def __exit__(self, *error: object) -> None:
        self._current.tag = self._before


def mismatch(calls: dict[str, int]) -> MismatchedCallsError:
    """The error for tasks (names in rank order) that are in different calls."""
    listed = ", ".join(
        f"{name} {'is ' if not number else ''}at {describe(tag)}"
        for number, (name, tag) in enumerate(calls.items())
    )
    return MismatchedCallsError(
        f"the replicas make different calls: {listed}",
        "All make the same ones in the same order, with the same sizes and data types: what "
        "evaluates, predicts, saves or gathers does so on every replica, not on the chief alone.",
    )
