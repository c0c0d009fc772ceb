"""How elements of each type are reduced: on bytes, so that torch's modes and hooks see nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from spartito.collectives.memory.rank_memory import Bytes
from spartito.errors import RefusedCallError

NUMPY: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.bool: np.bool_,
}
"""The types that numpy computes with; the half ones are torch's."""
HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float64, *HALF)
COMPLEX = (torch.complex64, torch.complex128)

_FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "SUM": (np.add, torch.add),
    "AVG": (np.add, torch.add),
    "PREMUL_SUM": (np.add, torch.add),
    "PRODUCT": (np.multiply, torch.mul),
    "MIN": (np.minimum, torch.minimum),
    "MAX": (np.maximum, torch.maximum),
    "BAND": (np.bitwise_and, None),
    "BOR": (np.bitwise_or, None),
    "BXOR": (np.bitwise_xor, None),
}

Join = Callable[[Bytes, Bytes, Bytes], object]
"""Reduces two rows of elements into a third, which may be one of them."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """One reduction of elements of one type.

    Attributes:
        itemsize: Bytes of an element.
        join: Reduces two rows.
        multiply: Multiplies a row by a number, in place.
        divide: Divides a row by a number, in place; whole numbers are cut off, as NCCL does.
    """

    itemsize: int
    join: Join
    multiply: Callable[[Bytes, float], object]
    divide: Callable[[Bytes, float], object]


@cache
def arithmetic(reduction: str, dtype: torch.dtype) -> Arithmetic:
    """The reduction of this name for elements of ``dtype``.

    Raises:
        RefusedCallError: The type has no such reduction.
    """
    if not _allowed(reduction, dtype):
        raise RefusedCallError(
            f"{reduction or 'this reduction'} of {str(dtype).removeprefix('torch.')} tensors",
            _advice(reduction, dtype),
        )
    by_numpy, by_torch = _FUNCTIONS[reduction]
    if dtype in NUMPY:
        return _numpy(by_numpy, NUMPY[dtype])
    return _torch(by_torch, dtype)


def _allowed(reduction: str, dtype: torch.dtype) -> bool:
    if reduction in ("BAND", "BOR", "BXOR"):
        return dtype in NUMPY and dtype not in FLOATS and dtype not in COMPLEX
    if reduction == "PREMUL_SUM":
        return dtype in FLOATS or dtype in COMPLEX
    if reduction == "AVG" and dtype == torch.bool:
        return False
    if reduction in ("MIN", "MAX"):
        return (dtype in NUMPY or dtype in HALF) and dtype not in COMPLEX
    return reduction in _FUNCTIONS and (dtype in NUMPY or dtype in HALF)


def _advice(reduction: str, dtype: torch.dtype) -> str:
    if dtype not in NUMPY and dtype not in HALF:
        return "Convert them to a type that can be summed, as float32 or bfloat16."
    if reduction == "AVG":
        return "Convert it to a type of numbers."
    if reduction == "PREMUL_SUM":
        return "Only floating point and complex tensors have it: take SUM."
    if dtype in COMPLEX:
        return "Complex numbers have no order: take SUM, AVG or PRODUCT."
    return "Only integers and bool have bits: take SUM, AVG, PRODUCT, MIN or MAX."


def _numpy(function: Any, kind: Any) -> Arithmetic:
    def join(first: Bytes, second: Bytes, into: Bytes) -> None:
        with np.errstate(all="ignore"):  # torch says nothing of an infinite sum either
            function(first.view(kind), second.view(kind), out=into.view(kind))

    def multiply(row: Bytes, factor: float) -> None:
        values = row.view(kind)
        with np.errstate(all="ignore"):
            np.multiply(values, kind(factor), out=values)

    def divide(row: Bytes, divisor: float) -> None:
        values = row.view(kind)
        if issubclass(kind, np.integer):
            down = values // kind(divisor)
            values[:] = down + ((down < 0) & (down * kind(divisor) != values))
        else:
            np.divide(values, kind(divisor), out=values)

    return Arithmetic(np.dtype(kind).itemsize, join, multiply, divide)


def _torch(function: Any, dtype: torch.dtype) -> Arithmetic:
    def view(row: Bytes) -> torch.Tensor:
        return torch.from_numpy(row).view(dtype)

    def join(first: Bytes, second: Bytes, into: Bytes) -> None:
        with _disable_current_modes(), torch.no_grad():
            function(view(first), view(second), out=view(into))

    def multiply(row: Bytes, factor: float) -> None:
        with _disable_current_modes(), torch.no_grad():
            view(row).mul_(factor)

    def divide(row: Bytes, divisor: float) -> None:
        with _disable_current_modes(), torch.no_grad():
            view(row).div_(divisor)

    return Arithmetic(dtype.itemsize, join, multiply, divide)
