"""Packed files of known examples, written by the libraries of each format or by its description."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

LENGTH = 7
"""Tokens of an example."""
Rows = Sequence[int]


def tokens(number: int) -> npt.NDArray[np.int32]:
    """The tokens of example ``number``, which are of no other."""
    return (np.arange(LENGTH, dtype=np.int32) * 1000 + number).astype(np.int32)


def write_parquet(file: Path, rows: Rows, block: int = 10) -> None:
    """Row groups of ``block`` examples."""
    values = pa.array(np.stack([tokens(row) for row in rows]).ravel())
    table = pa.table(
        {
            "tokens": pa.FixedSizeListArray.from_arrays(values, LENGTH),
            "y": pa.array(list(rows)),
            "text": [f"text {row}" for row in rows],
        }
    )
    pq.write_table(table, file, row_group_size=block)


def write_tar(file: Path, rows: Rows, padding: int = 0) -> None:
    """Samples of three files, of which one may be long so that blocks have few samples."""
    with tarfile.open(file, "w") as tar:
        for row in rows:
            array = io.BytesIO()
            np.save(array, tokens(row))
            parts = {"tokens.npy": array.getvalue(), "y.cls": b"%d" % row}
            parts["text.txt"] = b"text %d" % row
            if padding:
                parts["more.bin"] = bytes(padding)
            for name, data in parts.items():
                info = tarfile.TarInfo(f"samples/{row:06d}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def write_lines(file: Path, rows: Rows) -> None:
    """A line for each example, and empty ones, and no end of the last."""
    lines = [
        json.dumps({"tokens": tokens(row).tolist(), "y": row, "text": f"text {row}"})
        for row in rows
    ]
    file.write_text("\n\n".join(lines))


def write_mds(file: Path, rows: Rows, encoding: str = f"ndarray:int32:{LENGTH}") -> None:
    """A shard of MosaicML Streaming as its description has it, with a column of no fixed size."""
    header = {
        "version": 2,
        "format": "mds",
        "compression": None,
        "column_names": ["text", "tokens", "y"],
        "column_encodings": ["str", encoding, "int"],
        "column_sizes": [None, LENGTH * 4, 8],
    }
    head = json.dumps(header).encode()
    samples = []
    for row in rows:
        text = f"text {row}".encode()
        fixed = tokens(row).tobytes() + np.int64(row).tobytes()
        samples.append(np.uint32(len(text)).tobytes() + text + fixed)
    first = 4 * (len(rows) + 2) + len(head)
    edges = first + np.cumsum([0, *map(len, samples)])
    begin = np.uint32(len(rows)).tobytes() + edges.astype(np.uint32).tobytes()
    file.write_bytes(begin + head + b"".join(samples))


WRITERS: dict[str, tuple[str, Callable[[Path, Rows], Any], dict[str, str]]] = {
    "parquet": (".parquet", write_parquet, {}),
    "webdataset": (
        ".tar",
        write_tar,
        {"tokens": "tokens.npy", "y": "y.cls", "text": "text.txt"},
    ),
    "jsonl": (".jsonl", write_lines, {}),
    "mds": (".mds", write_mds, {}),
}
"""Of each format: the ending, what writes it, and how it calls the columns."""


def write_all(folder: Path, name: str, sizes: Sequence[int]) -> None:
    """Files of consecutive examples, as many in each as ``sizes`` says."""
    suffix, write, _ = WRITERS[name]
    folder.mkdir(exist_ok=True)
    first = 0
    for number, size in enumerate(sizes):
        write(folder / f"part-{number:03d}{suffix}", range(first, first + size))
        first += size


def names(format: str, *columns: str) -> tuple[str, ...]:
    """What a format calls columns."""
    return tuple(WRITERS[format][2].get(column, column) for column in columns)
