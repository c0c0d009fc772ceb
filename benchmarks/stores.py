"""Data in stores: training from S3 behind 20 ms, faults, memory, and the first batch of 10 GB."""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import Figure, announce, conclude, interpreter, parser, positive, progress
from benchmarks.photos import make_photos
from spartito.wire.ports import free_port
from tests.data.web_server import serving
from tests.storage.servers import ENV, seaweedfs

DELAY = 0.02
"""Seconds that a request to S3 takes longer."""
WEB_DELAY = 0.05
"""Seconds that a request to the web server takes longer."""
PARTS = ("training", "faults", "memory", "first")


def main() -> None:
    """Print each part's figures."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=3)
    options.add_argument("--data", type=Path, help="photos to scale, one folder per class")
    options.add_argument("--photos", type=positive, default=256, help="how many")
    options.add_argument(
        "--stores", metavar="PYTHON", type=interpreter,
        help="that of scripts/stores; without it the training is left out",
    )  # fmt: skip
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    given = options.parse_args()
    here = announce(__doc__)
    figures: list[Figure] = []
    for part in given.parts:
        if part == "training" and given.stores is None:
            print("training: left out, as --stores PYTHON names none")
            continue
        with tempfile.TemporaryDirectory() as top:
            figures += globals()[part](Path(top), given)
    conclude(here, figures, given.json)


def training(top: Path, given: argparse.Namespace) -> list[Figure]:
    """Photos of 500x375 from SeaweedFS, with nothing in the cache, against the folder."""
    os.environ[ENV] = given.stores
    make_photos(top / "photos", given.photos, given.data)
    (top / "store").mkdir()
    found: dict[str, list[float]] = {"folder": [], "S3": []}
    with seaweedfs(top / "store") as server:
        server.fill(top / "photos", "photos")
        port = int(server.env["AWS_ENDPOINT_URL"].rpartition(":")[2])
        with delayed(port) as other:
            env = {**server.env, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{other}"}
            losses = set()
            for number in range(given.rounds):
                sides = list(found) if number % 2 == 0 else list(found)[::-1]
                for side in sides:
                    where = str(top / "photos") if side == "folder" else f"{server.url}/photos"
                    told = job("train", where, given.photos, top / "cache", env)
                    found[side].append(told["rate"])
                    losses.add(told["loss"])
                medians = {side: statistics.median(rates) for side, rates in found.items()}
                progress(number, given.rounds, medians, "images/s")
    assert len(losses) == 1, f"the losses differ: {losses}"
    local, remote = (statistics.median(rates) for rates in found.values())
    return [
        Figure("training from a folder", local, measure="images/s"),
        Figure("training from S3 behind 20 ms / from the folder", remote / local, 0.97),
    ]


def faults(top: Path, given: argparse.Namespace) -> list[Figure]:
    """A pass where 1% of the requests fail and 1% are cut, against one without."""
    count = write(top / "data", 8, 50, 64)
    found: dict[str, list[float]] = {"without": [], "with": []}
    orders = set()
    with serving(top / "data") as server:
        url = f"{server.url}/{{0..7}}.parquet"
        for number in range(given.rounds):
            sides = list(found) if number % 2 == 0 else list(found)[::-1]
            for side in sides:
                server.fault = _faulty if side == "with" else lambda number: None
                told = job("stream", url, count, top / "cache")
                found[side].append(told["seconds"])
                orders.add(told["order"])
            progress(number, given.rounds, {s: f[-1] for s, f in found.items()}, "s")
    assert len(orders) == 1, "the orders differ"
    plain, faulty = (statistics.median(seconds) for seconds in found.values())
    return [Figure("a pass with faults / without", faulty / plain, 1.1, "<=")]


def _faulty(number: int) -> str | None:
    return {37: "500", 73: "cut"}.get(number % 100)


def memory(top: Path, given: argparse.Namespace) -> list[Figure]:
    """The memory of a process that streams 2 GB through a cache of 200 MB."""
    count = 32 * write(top / "data", 1, 16, 1024)
    for number in range(1, 32):
        os.link(top / "data" / "0.parquet", top / "data" / f"{number}.parquet")
    size = sum(file.stat().st_size for file in (top / "data").iterdir())
    with serving(top / "data") as server:
        url = f"{server.url}/{{0..31}}.parquet"
        env = {"SPARTITO_CACHE_LIMIT": "200MB"}
        told = job("stream", url, count, top / "cache", env)
    used = sum(file.stat().st_size for file in (top / "cache").rglob("*") if file.is_file())
    return [
        Figure("streamed", size / 1e6, measure="MB"),
        Figure("its cache afterwards", used / 1e6, 220, "<=", "MB"),
        Figure("memory beyond that before", told["grown"], 300, "<=", "MiB"),
    ]


def first(top: Path, given: argparse.Namespace) -> list[Figure]:
    """Seconds from nothing to the first batch of 10 GB on a server behind 50 ms."""
    count = 160 * write(top / "data", 1, 16, 1024)
    for number in range(1, 160):
        os.link(top / "data" / "0.parquet", top / "data" / f"{number}.parquet")
    size = sum(file.stat().st_size for file in (top / "data").iterdir())
    seconds, opened = [], []
    with serving(top / "data") as server:
        server.delay = WEB_DELAY
        for number in range(given.rounds):
            told = job("first", f"{server.url}/{{0..159}}.parquet", count, top / "cache")
            seconds.append(told["seconds"])
            opened.append(told["opened"])
            progress(number, given.rounds, {"first batch": told["seconds"]}, "s")
    return [
        Figure("size", size / 1e9, measure="GB"),
        Figure("opened", statistics.median(opened), measure="s"),
        Figure("first batch", statistics.median(seconds), 2 + 3 * WEB_DELAY, "<=", "s"),
    ]


def write(folder: Path, files: int, groups: int, rows: int) -> int:
    """Parquet with rows of 4 KiB that compress to nothing less; returns how many."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(files):
        values = random.integers(0, 2**31, (groups * rows, 1024), dtype=np.int32)
        x = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 1024)
        y = pa.array(np.arange(len(values)) + number * len(values))
        table = pa.table({"x": x, "y": y})
        pq.write_table(
            table, folder / f"{number}.parquet", row_group_size=rows, compression="none",
            use_dictionary=False,
        )  # fmt: skip
    return files * groups * rows


def job(
    what: str, url: str, count: int, cache: Path, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What a process of its own finds, with nothing in its cache."""
    shutil.rmtree(cache, ignore_errors=True)
    words = ["-m", "benchmarks.jobs.stored", what, url, f"{count}"]
    own = {"SPARTITO_CACHE": str(cache), "OMP_NUM_THREADS": "1", **(env or {})}
    done = subprocess.run(
        [sys.executable, *words], env={**os.environ, **own}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}:\n{done.stderr[-2000:]}")
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return told


@contextmanager
def delayed(port: int) -> Iterator[int]:
    """A port before ``port``; what a client sends arrives `DELAY` later."""
    own = free_port()
    process = multiprocessing.get_context("spawn").Process(target=_forward, args=(own, port))
    process.start()
    try:
        yield own
    finally:
        process.terminate()
        process.join()


def _forward(own: int, port: int) -> None:
    async def pass_on(
        source: asyncio.StreamReader, target: asyncio.StreamWriter, delay: float
    ) -> None:
        while data := await source.read(1 << 20):
            await asyncio.sleep(delay)
            target.write(data)
            await target.drain()
        target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", port)
        both = pass_on(reader, ours, DELAY), pass_on(theirs, writer, 0)
        await asyncio.gather(*both, return_exceptions=True)

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", own)
        await server.serve_forever()

    asyncio.run(run())


if __name__ == "__main__":
    main()
