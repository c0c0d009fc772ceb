"""Reads packed examples in shuffled order, as the users of each library write it.

    python -m benchmarks.jobs.readers write|read LIBRARY KIND FOLDER [--seconds N] [--workers N]

``write`` packs what lies in ``FOLDER/raw`` (JPEG files, or one array of tokens) for a library;
``read`` prints its examples per second as JSON. KIND is "images" or "tokens".
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

from benchmarks.common import flush_denormals

BATCH = 64
SHARD = 16 << 20
"""Bytes of a file, about, where a library lets one choose."""
GROUP = 256
"""Examples of a row group."""


def raw(kind: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The examples that are packed: bytes of JPEGs, or rows of tokens."""
    if kind == "images":
        for number, file in enumerate(sorted((folder / "raw").iterdir())):
            yield {"x": file.read_bytes(), "y": number % 10}
    else:
        for number, row in enumerate(np.load(folder / "raw.npy", mmap_mode="r")):
            yield {"x": np.array(row), "y": number % 10}


def decoded(data: bytes) -> torch.Tensor:
    """A JPEG as float32 of shape (3, 180, 180), by Pillow."""
    with Image.open(io.BytesIO(data)) as image:
        pixels = np.asarray(image.convert("RGB"))
    return torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1)


def example(kind: str, found: Any) -> tuple[torch.Tensor, int]:
    """One example as all sides give it."""
    x = found["x"]
    if kind == "images":
        return decoded(bytes(x)), int(found["y"])
    return torch.from_numpy(np.array(x, dtype=np.int32)), int(found["y"])


# --- Packing


def write_parquet(kind: str, folder: Path) -> None:
    """Parquet, for ours."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = list(raw(kind, folder))
    if kind == "images":
        x: Any = pa.array([row["x"] for row in rows], pa.binary())
    else:
        values = pa.array(np.stack([row["x"] for row in rows]).ravel())
        x = pa.FixedSizeListArray.from_arrays(values, len(rows[0]["x"]))
    table = pa.table({"x": x, "y": pa.array([row["y"] for row in rows])})
    for number, start in enumerate(range(0, len(rows), 4 * GROUP)):
        part = table.slice(start, 4 * GROUP)
        pq.write_table(part, folder / "parquet" / f"{number:05d}.parquet", row_group_size=GROUP)


def write_mds(kind: str, folder: Path) -> None:
    """Shards of MosaicML Streaming, by its writer."""
    from streaming import MDSWriter

    rows = list(raw(kind, folder))
    length = len(rows[0]["x"])
    column = "bytes" if kind == "images" else f"ndarray:int32:{length}"
    shutil.rmtree(folder / "mds")
    with MDSWriter(
        out=str(folder / "mds"), columns={"x": column, "y": "int"}, size_limit=SHARD
    ) as out:
        for row in rows:
            out.write(row)


def write_litdata(kind: str, folder: Path) -> None:
    """Chunks of LitData, by its `optimize`."""
    import litdata

    rows = list(raw(kind, folder))
    litdata.optimize(
        fn=_same, inputs=rows, output_dir=str(folder / "litdata"), chunk_bytes=SHARD, num_workers=1
    )


def _same(row: Any) -> Any:
    return row


def write_webdataset(kind: str, folder: Path) -> None:
    """Tars."""
    rows = list(raw(kind, folder))
    for number, start in enumerate(range(0, len(rows), 1024)):
        with tarfile.open(folder / "webdataset" / f"{number:05d}.tar", "w") as tar:
            for index, row in enumerate(rows[start : start + 1024], start):
                x = row["x"]
                if kind == "tokens":
                    buffer = io.BytesIO()
                    np.save(buffer, x)
                    x = buffer.getvalue()
                ending = "jpg" if kind == "images" else "npy"
                for name, data in ((ending, x), ("cls", b"%d" % row["y"])):
                    info = tarfile.TarInfo(f"{index:06d}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def write_datasets(kind: str, folder: Path) -> None:
    """Arrow files of Hugging Face's datasets."""
    import datasets

    rows = list(raw(kind, folder))
    columns = {"x": [row["x"] for row in rows], "y": [row["y"] for row in rows]}
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "datasets"))


# --- Reading


def read_ours(kind: str, folder: Path, format: str) -> Any:
    """Ours, from files of a format."""
    import spartito as sp

    names = ("x", "y")
    if format == "webdataset":
        names = ("jpg", "cls") if kind == "images" else ("npy", "cls")
    size = (180, 180) if kind == "images" else None
    found = sp.data.packed(folder / format, names, image_size=size, cache=folder / "cache").shuffle(
        blocks=16
    )
    return found.batch(BATCH)


def read_mds(kind: str, folder: Path, workers: int) -> Any:
    """MosaicML Streaming, with its shuffling within shards."""
    from streaming import StreamingDataset

    class Own(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            return example(kind, super().__getitem__(index))

    found = Own(local=str(folder / "mds"), shuffle=True, batch_size=BATCH, shuffle_block_size=4096)
    return DataLoader(found, BATCH, num_workers=workers)


def read_litdata(kind: str, folder: Path, workers: int) -> Any:
    """LitData."""
    import litdata

    class Own(litdata.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            return example(kind, super().__getitem__(index))

    found = Own(str(folder / "litdata"), shuffle=True)
    return litdata.StreamingDataLoader(found, batch_size=BATCH, num_workers=workers)


def read_webdataset(kind: str, folder: Path, workers: int) -> Any:
    """WebDataset, with a buffer of 4096 examples."""
    import webdataset as wds

    files = sorted(str(file) for file in (folder / "webdataset").iterdir())
    ending = "jpg" if kind == "images" else "npy"

    def made(found: Any) -> Any:
        x = found[ending]
        if kind == "tokens":
            x = np.load(io.BytesIO(x))
        return example(kind, {"x": x, "y": int(found["cls"])})

    stream = wds.WebDataset(files, shardshuffle=len(files)).shuffle(4096).map(made)
    return DataLoader(stream.batched(BATCH, collation_fn=_collated), None, num_workers=workers)


def _collated(rows: Any) -> Any:
    return torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows])


def read_datasets(kind: str, folder: Path, workers: int) -> Any:
    """Hugging Face's datasets: a memory map, permuted as a whole by torch's sampler."""
    import datasets

    found = datasets.load_from_disk(str(folder / "datasets"))
    if kind == "tokens":
        found = found.with_format("torch")
        return DataLoader(found, BATCH, shuffle=True, num_workers=workers)

    class Own(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(found)

        def __getitem__(self, index: int) -> Any:
            return example(kind, found[index])

    return DataLoader(Own(), BATCH, shuffle=True, num_workers=workers)


WRITE: dict[str, Callable[[str, Path], None]] = {
    "parquet": write_parquet,
    "mds": write_mds,
    "litdata": write_litdata,
    "webdataset": write_webdataset,
    "datasets": write_datasets,
}
READ: dict[str, Callable[[str, Path, int], Any]] = {
    "mds": read_mds,
    "litdata": read_litdata,
    "webdataset": read_webdataset,
    "datasets": read_datasets,
}


def main() -> None:
    """Write or read, see above."""
    options = argparse.ArgumentParser()
    options.add_argument("what", choices=["write", "read"])
    options.add_argument("library")
    options.add_argument("kind", choices=["images", "tokens"])
    options.add_argument("folder", type=Path)
    options.add_argument("--seconds", type=float, default=3.0)
    options.add_argument("--workers", type=int, default=0)
    given = options.parse_args()
    if given.what == "write":
        (given.folder / given.library).mkdir()
        WRITE[given.library](given.kind, given.folder)
        return
    flush_denormals()
    torch.set_num_threads(1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if given.library.startswith("spartito"):
        loader = read_ours(given.kind, given.folder, given.library.partition(" ")[2])
    else:
        loader = READ[given.library](given.kind, given.folder, given.workers)
    print(json.dumps({"rate": rate(loader, given.seconds)}))


def rate(loader: Any, seconds: float) -> float:
    """Examples per second over whole passes, after a first one."""
    passes, began, count = 0, 0.0, 0
    while True:
        if passes == 1:
            began = time.perf_counter()
        for batch in loader:
            x = batch["x"] if isinstance(batch, dict) else batch[0]
            count += len(x) if passes else 0
        passes += 1
        if passes > 1 and time.perf_counter() - began > seconds:
            return count / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
