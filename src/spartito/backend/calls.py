"""Which call a rank is at, as one number that it shows to the others: they compare.

| operation 5 bits | reduction 4 | dtype 5 | root 10 | elements 39 |
"""

from __future__ import annotations

import torch

from spartito.backend.errors import DifferentCallsError
from spartito.collectives.calls import DTYPES

OPERATIONS = (
    "no call",
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "send",
    "new memory",
    "all_reduce of sparse tensors",
)
REDUCTIONS = ("", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
TYPES = (
    *DTYPES,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
_OPERATION = {name: code for code, name in enumerate(OPERATIONS)}
_REDUCTION = {name: code for code, name in enumerate(REDUCTIONS)}
_TYPE = {dtype: code for code, dtype in enumerate(TYPES)}
_OTHER = 31  # a dtype that is not in the table
_NUMEL, _ROOT = (1 << 39) - 1, (1 << 10) - 1


def encode(
    operation: str, numel: int, dtype: torch.dtype | None = None, root: int = 0, reduction: str = ""
) -> int:
    """A call as a number of 63 bits."""
    code = _TYPE.get(dtype, _OTHER)  # type: ignore[arg-type]
    kind = (_OPERATION[operation] << 4 | _REDUCTION[reduction]) << 5 | code
    return (kind << 10 | root & _ROOT) << 39 | min(numel, _NUMEL)


def describe(tag: int) -> str:
    """The call in words, as ``all_reduce (SUM) of 64 float32``."""
    operation, reduction = OPERATIONS[tag >> 58], REDUCTIONS[tag >> 54 & 15]
    code, root, numel = tag >> 49 & 31, tag >> 39 & _ROOT, tag & _NUMEL
    dtype = str(TYPES[code]).removeprefix("torch.") if code < len(TYPES) else ""
    size = f" of {numel} {dtype or 'elements'}" if numel or dtype else ""
    way = " to" if operation in ("reduce", "gather") else " from"
    rooted = operation in ("broadcast", "reduce", "gather", "scatter")
    return (
        f"{operation}{f' ({reduction})' if reduction else ''}{size}"
        f"{f'{way} rank {root} of the group' if rooted else ''}"
    )


def different(calls: dict[str, int]) -> DifferentCallsError:
    """The error for ranks (names in order) that are at different calls."""
    listed = ", ".join(f"{name} is at {describe(tag)}" for name, tag in calls.items())
    return DifferentCallsError(
        f"the ranks make different calls: {listed}",
        "All ranks of a group make the same calls in the same order, with tensors of the same "
        "size and type.",
    )
