"""``spartito data pack``: a folder of images, or a packed set, into shards of one format."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from json import dumps

from spartito.data.blocks.locating import images_at, locate
from spartito.data.blocks.manifest import NAME, Manifest
from spartito.data.packing.destination import open_destination
from spartito.data.packing.pack import SHARD, pack
from spartito.data.packing.sources import Source, open_folder, open_packed
from spartito.data.packing.writers import make_writing
from spartito.errors import UserError, show
from spartito.storage.span_cache import bytes_of
from spartito.urls import is_remote, local_path

SHOWN = 20
"""Examples that were left out and are named; all are in the manifest."""


def main_pack(
    source: str,
    out: str,
    format: str = "parquet",
    *,
    seed: int = 0,
    keep_order: bool = False,
    keep_corrupt: bool = False,
    columns: Sequence[str] = (),
    shard_size: str | None = None,
    json: bool = False,
) -> int:
    """Pack, say what came of it, and return the exit code: 0, or 2 for the user's mistake."""
    try:
        size = SHARD if shard_size is None else bytes_of(shard_size, "--shard-size")
        _check_apart(source, out)
        examples = open_source(source, columns, keep_corrupt)
        writing = make_writing(format, examples.columns)
        order = None if keep_order else seed
        made = pack(examples, open_destination(out), writing, format, order, size)
    except UserError as error:
        return show(error)
    print(as_text(made, out), file=sys.stderr if json else sys.stdout)
    if json:
        facts = {name: getattr(made, name) for name in ("format", "examples", "classes", "columns")}
        left_out = [{"key": each.key, "why": each.why} for each in made.left_out]
        shards = len(made.shards)
        print(dumps({**facts, "shards": shards, "bytes": _bytes(made), "left_out": left_out}))
    return 0


def open_source(url: str, columns: Sequence[str], keep_corrupt: bool) -> Source:
    """What is to be packed: images where the folder has some, else packed files.

    Args:
        url: A path or URL.
        columns: Those of packed files that are packed; () takes all.
        keep_corrupt: Whether images are packed that cannot be decoded.

    Raises:
        UserError: There is no such thing, or an option is of the other kind.
    """
    path = images_at(url)
    if path is not None:
        if columns:
            raise UserError(
                f"--columns {','.join(columns)} of a folder of images",
                "Its columns are image, label and key: leave the option out.",
            )
        return open_folder(path, not keep_corrupt)
    if keep_corrupt:
        raise UserError(
            f"--keep-corrupt of {url}, which is no folder of images",
            "The bytes of packed images are taken as they are: leave the option out.",
        )
    return open_packed(locate(url), columns)


def as_text(made: Manifest, out: str) -> str:
    """What was packed, for a reader."""
    lines = [f"left out: {each.key} ({each.why})" for each in made.left_out[:SHOWN]]
    if len(made.left_out) > SHOWN:
        lines.append(f"and {len(made.left_out) - SHOWN} more, named in {NAME}")
    call = f'sp.data.packed("{out}"'
    call += ", image_size=(180, 180))" if "image" in made.columns.values() else ")"
    lines += [
        f"packed {made.examples:,} examples in {len(made.shards)} shards, {_bytes(made):,} bytes: "
        f"{out}; {len(made.left_out)} left out",
        f"read them by {call}",
    ]
    return "\n".join(lines).encode("utf-8", "backslashreplace").decode()


def _bytes(made: Manifest) -> int:
    return sum(shard.size for shard in made.shards)


def _check_apart(source: str, out: str) -> None:
    """Refuse to pack into the folder that is packed."""
    inner, outer = (local_path(each) if is_remote(each) else each for each in (out, source))
    if inner and outer and os.path.isdir(outer):
        parts = [os.path.realpath(each) for each in (inner, outer)]
        if os.path.commonpath(parts) == parts[1]:
            raise UserError(
                f"{out} lies inside of {source}, which is packed",
                "Name a folder outside of it: the shards would count as its files.",
            )
