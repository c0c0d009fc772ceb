"""The file beside packed shards that says what they hold: ``spartito-data.json``.

``spartito data pack`` writes it before the first shard, with ``whole`` false, and again when all
shards are there. So a folder that is still being packed is never taken for a data set.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from spartito.errors import UserError
from spartito.storage.files import File, Files, is_for_good, read_range

NAME = "spartito-data.json"
"""The file, in the folder of the shards."""
VERSION = 1
"""Of what is in it; later ones are refused."""
THREADS = 16
"""Shards that are looked at together."""


class Shard(msgspec.Struct, frozen=True):
    """A file of a packed data set.

    Attributes:
        name: In the folder.
        size: In bytes.
        sha256: Of its content, in hex.
        examples: How many it has.
    """

    name: str
    size: int
    sha256: str
    examples: int


class LeftOut(msgspec.Struct, frozen=True):
    """An example that could not be read, and was not packed.

    Attributes:
        shard: The shard that it would be in.
        key: Which one.
        why: What is wrong with it.
    """

    shard: str
    key: str
    why: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder of shards holds.

    Attributes:
        version: Of this file.
        format: Of the shards.
        whole: Whether all shards are there.
        plan: All that the bytes of the shards follow from.
        columns: What each column holds.
        names: What the format calls columns, where that is another name.
        example: The columns that an example has where nobody chooses; empty: all.
        classes: Names of the labels.
        shards: Those that are done.
        left_out: What could not be read.
    """

    version: int
    format: str
    whole: bool
    plan: dict[str, str]
    columns: dict[str, str]
    names: dict[str, str]
    example: list[str]
    classes: list[str]
    shards: list[Shard]
    left_out: list[LeftOut]

    @property
    def examples(self) -> int:
        """How many there are in all shards."""
        return sum(shard.examples for shard in self.shards)

    def encode(self) -> bytes:
        """The content of the file."""
        facts: dict[str, Any] = {**msgspec.to_builtins(self), "examples": self.examples}
        return msgspec.json.format(msgspec.json.encode(facts), indent=1) + b"\n"


def find_manifest(files: Files) -> Manifest | None:
    """The manifest of a folder.

    Args:
        files: The folder.

    Returns:
        It; None where there is none.

    Raises:
        UserError: It cannot be read, or a later version wrote it.
    """
    try:
        facts = files.look(NAME)
    except UserError as error:
        if isinstance(error.__cause__, Exception) and is_for_good(error.__cause__):
            return None
        raise
    return decode_manifest(read_range(files, facts, 0, facts.size), files.url)


def decode_manifest(content: bytes, url: str) -> Manifest:
    """The manifest that a file holds.

    Args:
        content: Of the file.
        url: Of its folder, for messages.

    Raises:
        UserError: It is none, or a later version wrote it.
    """
    try:
        version = msgspec.json.decode(content, type=dict[str, Any]).get("version")
        if isinstance(version, int) and version > VERSION:
            raise UserError(
                f"{url}/{NAME} has version {version}, and this Spartito reads up to {VERSION}",
                "Read it with the version that wrote it, or a later one.",
            )
        return msgspec.json.decode(content, type=Manifest)
    except msgspec.DecodeError as error:
        raise UserError(
            f"{url}/{NAME} is no manifest of packed data: {error}",
            "Pack the data again, or move that file somewhere else.",
        ) from error


def check_whole(files: Files, manifest: Manifest) -> None:
    """Refuse a data set that is not packed to its end.

    Raises:
        UserError: It is not whole.
    """
    if not manifest.whole:
        raise UserError(
            f"{files.url} is still being packed, or was left so",
            "Run `spartito data pack` again as before: it goes on with what is missing.",
        )


def shards_of(files: Files, manifest: Manifest) -> list[File]:
    """The shards of a data set, each as large as its manifest says.

    Args:
        files: Its folder.
        manifest: Of the folder.

    Raises:
        UserError: A shard is missing or of another size, or the data set is not whole.
    """
    check_whole(files, manifest)
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(files.look, [shard.name for shard in manifest.shards]))
    for file, shard in zip(found, manifest.shards, strict=True):
        if file.size != shard.size:
            raise UserError(
                f"{files.url}/{file.name} has {file.size:,} bytes, its manifest says "
                f"{shard.size:,}",
                "It was cut off or replaced: copy it anew, or pack the data again.",
            )
    return found
