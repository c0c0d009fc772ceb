"""Tensors as rows of bytes, where they lie: no torch operation sees what is written there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spartito.collectives.memory.rank_memory import Bytes
from spartito.errors import RefusedCallError

_KINDS = {1: "|u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}
KEPT = 512  # rows that are kept, by address
_rows: dict[tuple[int, int], Bytes] = {}


class _Interface:
    """Memory as numpy finds it."""

    def __init__(self, **interface: object) -> None:
        self.__array_interface__ = {"version": 3, **interface}


def check_device(tensor: Tensor) -> None:
    """Raise `RefusedCallError` for a tensor that is not in this machine's memory."""
    if tensor.device.type != "cpu":
        raise RefusedCallError(
            f"a tensor on {tensor.device} goes neither by shared memory nor by sockets",
            "Move it to the CPU, or take another backend for that device, as nccl.",
        )


def check(tensor: Tensor) -> None:
    """Raise `RefusedCallError` for a tensor that is not in this machine's memory as it is."""
    check_device(tensor)
    if tensor.layout is not torch.strided:
        raise RefusedCallError(
            f"a tensor of layout {tensor.layout}", "Make it dense: tensor.to_dense()."
        )
    if tensor.is_quantized:
        raise RefusedCallError("a quantized tensor", "Send tensor.int_repr() and its scale.")
    if tensor.is_conj() or tensor.is_neg():
        raise RefusedCallError(
            "a tensor that is a conjugate or negative view",
            "Give tensor.resolve_conj().resolve_neg() in its offset.",
        )


def is_channels_last(tensor: Tensor) -> bool:
    """Whether the channels of an image are neighbours in memory, so that it crosses as it lies."""
    return (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    )


def row_of(tensor: Tensor) -> Bytes:
    """The bytes of a contiguous tensor, where they lie; `RefusedCallError` if on a device."""
    if not tensor.is_cpu:
        check_device(tensor)
    address, size = tensor.data_ptr(), tensor.numel() * tensor.itemsize
    row = _rows.get((address, size))
    if row is None:
        if len(_rows) >= KEPT:
            _rows.clear()
        if not size:
            return np.empty(0, dtype=np.uint8)
        interface = _Interface(data=(address, False), shape=(size,), typestr="|u1")
        row = _rows[address, size] = np.asarray(interface)
    return row


def _elements(tensor: Tensor) -> NDArray[Any]:
    """The elements of a strided tensor, as numbers of their size."""
    size = tensor.itemsize
    interface = _Interface(
        data=(tensor.data_ptr(), False),
        shape=tuple(tensor.shape),
        strides=tuple(size * stride for stride in tensor.stride()),
        typestr=_KINDS[size],
    )
    return np.asarray(interface)


def row_to_read(tensor: Tensor) -> Bytes:
    """The bytes of any strided tensor, in order; a copy where it is not contiguous."""
    check(tensor)
    if tensor.is_contiguous():
        return row_of(tensor)
    return np.ascontiguousarray(_elements(tensor)).reshape(-1).view(np.uint8)


@contextmanager
def written(tensors: Sequence[Tensor]) -> Iterator[list[Bytes]]:
    """Rows for the elements of ``tensors``: what is in them at the end is in the tensors."""
    rows = [row_to_read(tensor) for tensor in tensors]
    yield rows
    for tensor, row in zip(tensors, rows, strict=True):
        if not tensor.is_contiguous() and tensor.numel():
            elements = _elements(tensor)
            elements[...] = row.view(elements.dtype).reshape(elements.shape)


@contextmanager
def joined(tensors: Sequence[Tensor]) -> Iterator[Bytes]:
    """One row with the elements of all ``tensors``, instead of `written`."""
    with written(tensors) as rows:
        if len(rows) == 1:
            yield rows[0]
            return
        row = np.concatenate(rows) if rows else np.empty(0, dtype=np.uint8)
        yield row
        start = 0
        for part in rows:
            part[:] = row[start : start + len(part)]
            start += len(part)
