"""A checksum of some values of a batch, by which tasks that read other streams are found.

Data by index is known by its order. A stream has none: a data set that divides itself by rank, as
other libraries want it, would lose examples here without a word, since each task keeps its data
shard of what it read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

VALUES = 1024
"""Of a row of a tensor, at most; they lie at equal distances."""


def stream_checksum(data: Any) -> int:
    """A checksum of the first and the last row of a global batch.

    Not all values, which would take as long as a small step: of each tensor 2 x 1,024. Floating
    ones count only where there is nothing else, as machines of other kinds may round them
    otherwise.

    Args:
        data: A batch of the host's tensors, lists, tuples and dicts. What is none of these, of
            another layout or on a device is not looked at.
    """
    rows = list(_ends(data))
    exact = [row for row in rows if not isinstance(row, Tensor) or not row.is_floating_point()]
    found = 0
    for row in exact or rows:
        if isinstance(row, Tensor):
            some = row.detach().flatten()[:: row.numel() // VALUES + 1].contiguous()
            found = crc32(some.view(torch.uint8).numpy().tobytes(), found)
        else:
            found = crc32(repr(row).encode(errors="backslashreplace"), found)
    return found


def _ends(data: Any) -> Iterator[Tensor | str | bytes | int]:
    """The first and the last row of each part."""
    if isinstance(data, Tensor):
        known = data.layout is torch.strided and not data.is_nested and data.device.type == "cpu"
        if known and data.numel():
            yield from (data[0], data[-1]) if data.dim() else (data,)
    elif isinstance(data, Mapping):
        for part in data.values():
            yield from _ends(part)
    elif isinstance(data, tuple | list):
        texts = data and all(isinstance(item, str | bytes | int) for item in data)
        for part in (data[0], data[-1]) if texts else data:
            yield from _ends(part)
    elif isinstance(data, str | bytes | int):
        yield data
