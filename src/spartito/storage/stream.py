"""One safetensors file, written tensor by tensor: no more than one of them is copied at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spartito.errors import writable
from spartito.failpoints import failpoint
from spartito.storage.atomic import write_all

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
"""The dtypes that the format holds, and what it calls them."""

DTYPES = {code: dtype for dtype, code in CODES.items()}

METADATA = "__metadata__"
"""The name that the format keeps for itself."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a file that is still to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """The order of ``entries`` in a file: large elements first, so that all are aligned."""
    return sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))


def write_stream(
    file: str | os.PathLike[str],
    entries: Sequence[Entry],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write a safetensors file.

    Args:
        file: Its path; a file that is there is replaced.
        entries: What it will hold, as `in_order` gives them.
        tensors: Their values in the same order, on any device and of any stride; each is asked for
            when the one before is written.
        metadata: Strings for the file's head.

    Raises:
        UnwritableError: If the file cannot be written.
    """
    path = Path(file)
    with writable(path):
        path.unlink(missing_ok=True)  # who has the older one mapped keeps it
        with path.open("xb", buffering=0) as out:
            write_all(out.fileno(), _head(entries, metadata))
            failpoint("storage.stream.begun")
            for entry, tensor in zip(entries, tensors, strict=True):
                write_all(out.fileno(), _bytes(entry, tensor))


def _head(entries: Sequence[Entry], metadata: Mapping[str, str]) -> memoryview:
    """The length of the head in eight bytes, and the head: JSON, filled up to a multiple of 8."""
    head: dict[str, object] = {METADATA: dict(metadata)}
    done = 0
    for entry in entries:
        head[entry.name] = {
            "dtype": CODES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [done, done + entry.nbytes],
        }
        done += entry.nbytes
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _bytes(entry: Entry, tensor: Tensor) -> memoryview:
    """The values of a tensor as the format has them, without a copy where they lie so."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if tuple(plain.shape) != entry.shape or plain.dtype != entry.dtype:
        raise ValueError(f"{entry} and a tensor {tuple(plain.shape)} of {plain.dtype}")
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
