"""``spartito data info``: what a data set holds, and what reading it takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import BytesIO
from json import dumps
from typing import Any

import numpy as np
from PIL import Image

from spartito.data.blocks.formats import Columns, Missing
from spartito.data.blocks.locating import PackedSet, images_at, locate, open_set
from spartito.data.blocks.reading import ahead_of
from spartito.data.packing.columns import column_of
from spartito.data.packing.sources import open_folder
from spartito.errors import UserError, show
from spartito.names import size

LIVE = 16
"""Blocks of a shuffle whose memory is estimated."""

Facts = dict[str, Any]


def main_info(url: str, columns: Sequence[str] = (), json: bool = False) -> int:
    """Say what a data set holds, and return the exit code: 0, or 2 for the user's mistake."""
    try:
        path = images_at(url)
        facts = packed_facts(url, columns) if path is None else folder_facts(path)
    except UserError as error:
        return show(error)
    print(dumps(facts) if json else as_text(facts))
    return 0


def folder_facts(path: str) -> Facts:
    """What a folder of images holds.

    Args:
        path: The folder.

    Raises:
        UserError: It has no folders of classes.
    """
    source = open_folder(path)
    counts = np.bincount(source.found.labels, minlength=len(source.classes)).tolist()
    return {
        "url": path,
        "format": "images",
        "files": len(source.found.paths),
        "bytes": int(source.sizes.sum()),
        "examples": len(source.found.paths),
        "classes": dict(zip(source.classes, counts, strict=True)),
        "columns": {"image": f"image {source.columns[0].dtype}".strip(), "label": "int64"},
    }


def packed_facts(url: str, columns: Sequence[str]) -> Facts:
    """What packed files hold.

    Args:
        url: As for `spartito.data.packed`.
        columns: Those that are looked at; () takes all.

    Raises:
        UserError: As `spartito.data.packed`.
    """
    where = locate(url)
    data = open_set(where, where.named(columns) if columns else None)
    block = data.reader.get([0])[0]
    said: Facts = {}
    if where.manifest is not None:
        said = {
            "classes": where.manifest.classes,
            "example": where.manifest.example,
            "left_out": len(where.manifest.left_out),
        }
    return {
        "url": url,
        "format": where.format,
        "files": len(data.blocks.files),
        "bytes": data.blocks.bytes,
        "blocks": len(data.blocks),
        "examples": int(data.blocks.edges[-1]),
        **said,
        "columns": {name: described(name, values) for name, values in block.items()},
        "cache": _cache_facts(data),
        "memory": {"blocks": LIVE, "bytes": memory_of(data, block, LIVE)},
    }


def described(name: str, values: Sequence[Any]) -> str:
    """What a column of a block holds, in a few words."""
    try:
        column = column_of(name, values)
    except UserError:
        return "nothing in the first block"
    value = next(value for value in values if not isinstance(value, Missing))
    if column.kind == "image":
        with Image.open(BytesIO(value)) as image:
            return f"image, as {column.dtype} {image.width}x{image.height}, {size(len(value))}"
    if column.kind == "array":
        shapes = {np.shape(each) for each in values if not isinstance(each, Missing)}
        shape = shapes.pop() if len(shapes) == 1 else "of several shapes"
        return f"{column} {shape}"
    if column.kind in ("string", "bytes"):
        return f"{column}, as one of {len(value)}"
    return str(column)


def memory_of(data: PackedSet, block: Columns, live: int) -> int:
    """The memory that a task takes for blocks in use, about.

    Args:
        data: The files.
        block: The first block, by which the others are estimated.
        live: Blocks in use at a time.
    """
    taken = sum(_bytes_of(values) for values in block.values())
    first = data.blocks.block(0)
    packed = sum(len(part) for _, part in data.read.parts(0)) or first.stop - first.start
    spans = [each.stop - each.start for index in data.blocks.indexes for each in index.blocks]
    chosen = packed / max(1, first.stop - first.start)  # of a block only some columns are read
    ahead = ahead_of(data.blocks.bytes // max(1, len(spans)))
    held = sorted(spans, reverse=True)[: live + ahead + 1]
    return round(sum(held) * chosen * taken / max(1, packed))


def as_text(facts: Facts) -> str:
    """The facts for a reader, a line each."""
    lines = [f"{facts['url']}: {facts['format']}"]
    lines.append(f"  {facts['examples']:,} examples in {facts['files']:,} files")
    lines[-1] += f", {size(facts['bytes'])}"
    if "blocks" in facts:
        lines[-1] += f", {facts['blocks']:,} blocks"
    classes = facts.get("classes")
    if isinstance(classes, dict):
        lines.append("  classes: " + ", ".join(f"{name} {n:,}" for name, n in classes.items()))
    elif classes:
        lines.append(f"  classes: {', '.join(classes)}")
    if facts.get("left_out"):
        lines.append(f"  {facts['left_out']:,} examples could not be read and were left out")
    lines += [f"  column {name}: {said}" for name, said in facts["columns"].items()]
    if "memory" in facts:
        memory = facts["memory"]
        lines.append(f"  cache: {_cache_text(facts['cache'])}")
        lines.append(
            f"  memory of a task with shuffle(blocks={memory['blocks']}): "
            f"about {size(memory['bytes'])}"
        )
    return "\n".join(lines).encode("utf-8", "backslashreplace").decode()


def _cache_facts(data: PackedSet) -> Facts | None:
    if data.where.files.local:
        return None
    cached = sum(data.read.is_cached(block) for block in range(len(data.blocks)))
    return {"folder": str(data.cache.folder), "blocks": cached}


def _cache_text(facts: Facts | None) -> str:
    if facts is None:
        return "none, files of this machine are read where they lie"
    return f"{facts['blocks']:,} blocks in {facts['folder']}"


def _bytes_of(values: Iterable[Any]) -> int:
    """The memory of a column, about."""
    if (known := getattr(values, "nbytes", None)) is not None:
        return int(known)
    return sum(_bytes_of_value(value) for value in values)


def _bytes_of_value(value: Any) -> int:
    if isinstance(value, bytes | str):
        return len(value) + 50
    if isinstance(value, np.ndarray):
        return value.nbytes + 100
    return 30
