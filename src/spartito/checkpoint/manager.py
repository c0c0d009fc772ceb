"""Checkpoints of a run: written whole, checked when read, the last few kept and the best.

    checkpoints/
        best.json                 {"name", "monitor", "value", "sequence"}
        step-00000400/
            model.safetensors     the parameters under the user's own names
            optimizer.safetensors
            state.json            all that is no tensor
            manifest.json         sizes and checksums of the files above, order, metrics, the
                                  name and folder that it was written as and into, and
                                  {"monitor", "value"} if it was the best when it was written

A writer may be killed before it gets to best.json: the newest checkpoint that was the best and is
newer than best.json (its ``sequence`` is that of the newest checkpoint at the time) is the best.

A folder may hold more than checkpoints of a manager: downloads, what a user saved by name, copies.
Only what was written here, under the name that it still has, is ever removed.

A state is a dict of sections, ``{"model": ..., "optimizer": ..., "trainer": ...}``, each a nested
tree as `spartito.storage.pack_state` takes it; a section with tensors has its own file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spartito.checkpoint.stored_parts import SUFFIX, Reader
from spartito.errors import UserError
from spartito.failpoints import failpoint
from spartito.notes import warn
from spartito.storage.atomic import (
    MANIFEST,
    Manifest,
    NewerFormatError,
    check_writable,
    is_whole,
    read_manifest,
    remove_directory,
    sweep,
    verify,
    write_directory,
    write_file_atomically,
)
from spartito.storage.leftovers import is_leftover
from spartito.storage.tensors import Json, pack_state, save_tensors, unpack_state

STATE = "state.json"
BEST = "best.json"

Score = tuple[str, float]
"""A monitored figure and its value, by which a checkpoint is the best so far."""


@dataclass(frozen=True)
class Best:
    """The pointer to the best checkpoint: its directory's name, and which figure made it so."""

    name: str
    monitor: str
    value: float


def write_checkpoint(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write ``state`` as the directory ``path``, whole or not at all; an older one is replaced.

    ``about`` is JSON for the manifest. Raises `UserError` when something in ``state`` cannot be
    saved (before anything is written), or the folder cannot be written.
    """
    for section, tree in state.items():
        pack_state(tree, section)
    with write_directory(path, about) as new:
        write_sections(new, state)


def write_sections(directory: Path, state: Mapping[str, Any]) -> None:
    """Add sections to a checkpoint that is being written; those that are there stay.

    Args:
        directory: What `spartito.storage.atomic.write_directory` gave.
        state: Nested trees of plain values and tensors, by section.

    Raises:
        UserError: If something in ``state`` cannot be saved.
    """
    packed = {section: pack_state(tree, section) for section, tree in state.items()}
    for section, (_, tensors) in packed.items():
        if tensors:
            save_tensors(tensors, directory / f"{section}{SUFFIX}")
    write_trees(directory, {section: tree for section, (tree, _) in packed.items()})


def write_trees(directory: Path, trees: Mapping[str, Json]) -> None:
    """Add the trees of sections, without their tensors, to a checkpoint that is being written."""
    file = directory / STATE
    before = json.loads(file.read_bytes()) if file.exists() else {}
    file.write_text(json.dumps({**before, **trees}, allow_nan=False) + "\n")


_NAME = re.compile(r"\w[\w.-]{0,99}")
"""What a section may be called: a part of a file's name."""


def read_trees(directory: Path) -> dict[str, Json]:
    """The trees of a checkpoint's sections, without their tensors.

    Raises:
        UserError: If there are none, or they are no trees of sections.
    """
    try:
        trees = json.loads((directory / STATE).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{directory / STATE} cannot be read: {error}") from error
    if not isinstance(trees, dict):
        raise UserError(f"{directory / STATE} cannot be read: it has no sections")
    if odd := [name for name in trees if not _NAME.fullmatch(name)]:
        raise UserError(f"{directory / STATE} names a section {odd[0]!r}, which no file can have")
    return trees


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The state that was written to the directory ``path``, its tensors on the CPU.

    Every file is compared with its checksum first. Raises `UserError` that names the file that
    is missing or damaged.
    """
    identify_checkpoint(path)
    return read_sections(path)


def read_sections(path: str | os.PathLike[str], *names: str) -> dict[str, Any]:
    """The sections ``names`` of a checkpoint that are there, all where none is named.

    Its files are not compared with their checksums: `identify_checkpoint` does that.
    """
    trees = read_trees(Path(path))
    state: dict[str, Any] = {}
    for section in [name for name in trees if not names or name in names]:
        state[section] = unpack_state(trees[section], Reader(path, section).all())
    return state


def identify_checkpoint(path: str | os.PathLike[str]) -> str:
    """A SHA-256 that checkpoints with the same files share, whose checksums hold."""
    manifest = verify(path)
    if STATE not in manifest.files:
        raise UserError(f"{path} holds no checkpoint: it has no {STATE}")
    files = sorted((name, fact.sha256) for name, fact in manifest.files.items())
    return hashlib.sha256(repr(files).encode()).hexdigest()


class CheckpointManager:
    """The checkpoints under one directory; one process at a time writes there."""

    def __init__(
        self, directory: str | os.PathLike[str], keep: int | None = None, alone: bool = False
    ) -> None:
        """Nothing is read or written yet.

        Args:
            directory: Where they are.
            keep: How many of the newest stay, all when None; the best stays besides.
            alone: Whether the directory is for these alone: then those that came with it from
                elsewhere, or were written by an earlier version, are ours too.
        """
        if keep is not None and keep < 1:
            raise UserError(
                f"keep is {keep}, and at least 1 checkpoint must stay", "keep=None: all"
            )
        self.directory = Path(directory)
        self.keep = keep
        self.alone = alone

    def prepare(self) -> None:
        """Make the directory, clear what killed writers left, and try to write there.

        Raises `UserError` now rather than after the first epoch.
        """
        sweep(self.directory)
        check_writable(self.directory)
        self._pointer()  # a file of that name that is none would be replaced

    def save(
        self,
        state: Mapping[str, Any],
        name: str,
        metrics: Mapping[str, float] | None = None,
        best: Score | None = None,
    ) -> Path:
        """Write ``state`` as the newest checkpoint ``name``, then remove the oldest beyond `keep`.

        ``metrics`` are kept in its manifest. ``best`` is (monitor, value) when this checkpoint
        is the best so far. An older checkpoint of that name is replaced.
        """
        path = self.directory / name
        write_checkpoint(path, state, self.begin(name, metrics, best))
        self.end(name, best)
        return path

    def begin(
        self, name: str, metrics: Mapping[str, float] | None = None, best: Score | None = None
    ) -> dict[str, Any]:
        """Before the checkpoint ``name`` is written: what its manifest is to say. See `save`."""
        if not name or name.startswith(".") or Path(name).name != name:
            raise UserError(f"{name!r} cannot name a checkpoint: it must be a plain file name")
        sweep(self.directory)
        about = about_of(self.next_sequence, metrics, best)
        return about | {WRITTEN: _written(self.directory / name)}

    def end(self, name: str, best: Score | None = None) -> None:
        """After it: name it the best if it is, and remove the oldest beyond `keep`."""
        if best is not None:
            self.name_best(Best(name, *best))
        self._remove_oldest(self.directory / name)

    def name_best(self, best: Best) -> None:
        """Let ``best.json`` point to this one; the best is never removed."""
        self._pointer()  # a user's own file of that name stays
        pointer = {**asdict(best), "sequence": self.next_sequence - 1}
        write_file_atomically(self.directory / BEST, json.dumps(pointer) + "\n")

    @property
    def next_sequence(self) -> int:
        """The number of the checkpoint that is saved next; all that are there have lower ones."""
        return max([0, *map(sequence_of, self.candidates())]) + 1

    def all(self) -> list[Path]:
        """All checkpoints, oldest first, without checking them; damaged ones come first."""
        return sorted(self.candidates(), key=lambda path: (sequence_of(path), path.name))

    def latest(self) -> Path | None:
        """The newest checkpoint whose files are all whole, or None.

        A damaged one is named in the log, and the one before it is taken. One that was saved by
        name has no number: it is taken where there is no other. One that a later
        version has written is a `UserError`.
        """
        paths = self.all()
        named = []
        # One whose order is lost might have been the newest: say so before passing it by.
        for path in reversed([path for path in paths if sequence_of(path) < 0]):
            manifest = self._looked_at(path, read_manifest)
            if manifest is not None and STATE in manifest.files:
                named.append((_number(manifest.about.get("step")), path))
        ordered = [path for path in reversed(paths) if sequence_of(path) >= 0]
        for path in [*ordered, *(path for _, path in sorted(named, reverse=True))]:
            if self._looked_at(path, verify) is not None:
                return path
        return None

    @staticmethod
    def _looked_at(path: Path, look: Callable[[Path], Manifest]) -> Manifest | None:
        """What ``look`` finds there; None for a damaged one, which is named in the log."""
        try:
            return look(path)
        except NewerFormatError:  # an older one would be silently another model
            raise
        except UserError as error:
            warn("%s is passed over: %s", path.name, error)
            return None

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """The state in ``path``, which is a directory or the name of one of ours."""
        ours = self.directory / path
        return read_checkpoint(ours if ours.is_dir() else path)

    @property
    def best_so_far(self) -> Best | None:
        """The best checkpoint that was named, or None; a `UserError` when that cannot be read."""
        named, sequence = self._pointer()
        for path in reversed(self.all()):
            if sequence_of(path) <= sequence:
                break
            mark = read_manifest(path).about.get("best")
            if mark is not None:
                found = unpack_state(mark, {})
                return Best(path.name, str(found["monitor"]), float(found["value"]))
        return named

    def _pointer(self) -> tuple[Best | None, int]:
        """What ``best.json`` says, and which checkpoint was the newest then."""
        file = self.directory / BEST
        try:
            raw = json.loads(file.read_bytes())
            best = Best(str(raw["name"]), str(raw["monitor"]), float(raw["value"]))
            return best, int(raw.get("sequence", sequence_of(self.directory / best.name)))
        except (FileNotFoundError, NotADirectoryError):
            return None, -1
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{file} is not what says which checkpoint is the best: {error}",
                "Name another directory for checkpoints, or move it somewhere else.",
            ) from error

    @property
    def best(self) -> Path | None:
        """The best checkpoint, when one was named the best and is still there."""
        pointer = self.best_so_far
        path = self.directory / pointer.name if pointer else None
        return path if path and path.is_dir() else None

    def candidates(self) -> list[Path]:
        """All checkpoints in any order; no file of theirs is read."""
        try:
            found = list(self.directory.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [p for p in found if not is_leftover(p) and any((p / f).exists() for f in _FILES)]

    def remove_all(self) -> None:
        """Remove all that was written here, oldest first; what else is in the folder stays."""
        for path in self.mine():
            remove_directory(path)

    def mine(self) -> list[Path]:
        """Those that this manager may remove, oldest first."""
        is_ours = moved_here if self.alone else written_here
        return [path for path in self.all() if is_ours(path)]

    def _remove_oldest(self, newest: Path) -> None:
        """Remove what `keep` newer ones have followed, of those that were written here.

        Only those whose files are all there count: a damaged one pushes out no good one.
        """
        if self.keep is None:
            return
        mine = self.mine()
        followed = [path for path in mine if is_whole(path)][-self.keep :]
        if len(followed) < self.keep:
            return
        stay = {newest, self.best}
        for path in mine[: mine.index(followed[0])]:
            if path not in stay:
                failpoint("checkpoint.before_remove")
                remove_directory(path)


_FILES = (MANIFEST, STATE, f"model{SUFFIX}")

WRITTEN = "written"
"""What a manifest says of where it was written: a copy elsewhere is somebody's own."""


def about_of(
    sequence: int, metrics: Mapping[str, float] | None, best: Score | None
) -> dict[str, Any]:
    """What a manifest says of a checkpoint beside its files, as JSON.

    Args:
        sequence: Its number among its neighbours.
        metrics: The figures of its epoch.
        best: (monitor, value) where it is the best so far.
    """
    figures, _ = pack_state(dict(metrics or {}), "metrics")
    about: dict[str, Any] = {"sequence": sequence, "metrics": figures}
    if best is not None:
        about["best"], _ = pack_state({"monitor": best[0], "value": best[1]}, "best")
    return about


def _written(path: Path) -> dict[str, str]:
    """The name of a checkpoint, and a mark of its folder, which tells nobody where that is."""
    folder = os.path.realpath(path.parent)
    return {"name": path.name, "folder": hashlib.sha256(folder.encode()).hexdigest()[:16]}


def written_here(path: Path) -> bool:
    """Whether a manager of this folder wrote ``path``, under the name that it has."""
    try:
        return not path.is_symlink() and read_manifest(path).about.get(WRITTEN) == _written(path)
    except UserError:
        return False


def moved_here(path: Path) -> bool:
    """Whether a manager wrote ``path`` under the name that it has, wherever the folder was then."""
    try:
        about = read_manifest(path).about
        mark = about.get(WRITTEN) or {"name": path.name}  # an earlier version wrote none
        return not path.is_symlink() and "sequence" in about and mark["name"] == path.name
    except (UserError, TypeError, KeyError):
        return False


def _number(value: object) -> int:
    return value if isinstance(value, int) else -1


def sequence_of(path: Path) -> int:
    """When ``path`` was written among its neighbours, from 1; -1 when that cannot be read."""
    try:
        return int(read_manifest(path).about.get("sequence", -1))
    except (UserError, ValueError, TypeError):
        return -1
