"""``spartito data check``: finds the image files that are not what they say.

Reads every file as training does, and asks more of it: that its bytes are of the format in its
name, that none are missing, that its colours are not CMYK, on request that a JPEG has a JFIF
header. Imports no torch.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from json import dumps
from pathlib import Path
from typing import Any

from spartito.data.images.decode import decode, read_bytes
from spartito.data.images.headers import (
    ImageFault,
    Kind,
    has_exif,
    has_jfif,
    promised_format,
    sniff,
)
from spartito.data.images.walk import image_files
from spartito.data.reading.progress import Progress
from spartito.errors import UserError, show

THREADS = 4
_WAVE = 256  # files in the hands of the threads at a time: a million paths need no million tasks


@dataclass(frozen=True, slots=True)
class Finding:
    """One bad file: where, what is wrong with it, and the details in a few words."""

    path: Path
    kind: Kind
    detail: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found below ``directory``, and what it did about it.

    ``ignored`` counts files that training would not read either, by their name. ``moved`` has
    pairs of (from, to), ``failed`` pairs of (file that could not be removed or moved, reason).
    """

    directory: Path
    checked: int
    ignored: int
    findings: tuple[Finding, ...]
    removed: tuple[Path, ...] = ()
    moved: tuple[tuple[Path, Path], ...] = ()
    failed: tuple[tuple[Path, str], ...] = ()

    @property
    def left(self) -> int:
        """How many bad files were neither removed nor moved."""
        return len(self.findings) - len(self.removed) - len(self.moved)

    @property
    def kinds(self) -> dict[Kind, int]:
        """How many files there are of each kind that was found, the most frequent first."""
        return dict(Counter(f.kind for f in self.findings).most_common())


def inspect(path: Path | str, jfif_only: bool = False) -> Finding | None:
    """What is wrong with one file, the gravest thing first; None for a good one."""
    try:
        data = read_bytes(path)
        promised = promised_format(path)
        found = sniff(data)
        if found is not None and promised is not None and found != promised:
            raise ImageFault(Kind.WRONG_HEADER, f"named {Path(path).suffix}, but it is {found}")
        # The smallest scale of a JPEG skips most arithmetic, and yet its whole stream is read.
        image = decode(data, promised, "L", (1, 1))
        if image.mode == "CMYK":
            raise ImageFault(Kind.CMYK, "four colours of print, not red, green and blue")
        if jfif_only and found == "JPEG" and not has_jfif(data):
            raise ImageFault(Kind.NO_JFIF, "only Exif" if has_exif(data) else "no JFIF header")
    except ImageFault as fault:
        return Finding(Path(path), fault.kind, fault.detail)
    return None


def scan(directory: Path | str, jfif_only: bool = False) -> Iterator[Finding]:
    """The bad files below ``directory``, in sorted order of their paths, as they are found."""
    paths = image_files(directory).images
    return (f for f in _inspect_all(paths, jfif_only) if f is not None)


def check_folder(
    directory: Path | str,
    *,
    jfif_only: bool = False,
    remove: bool = False,
    move_to: Path | str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Check every image file below ``directory``; remove the bad ones, or move them, if asked.

    ``jfif_only`` wants a JFIF header of JPEG files; other formats it leaves alone. ``move_to``
    keeps a file's path relative to ``directory`` and never overwrites: a number goes into the
    name. ``progress`` is told (files done, files in all).

    Raises `UserError` before anything is touched: no such directory or no image file in it, both
    ``remove`` and ``move_to``, a target inside ``directory`` or one that cannot be written.
    """
    root = Path(directory)
    target = None if move_to is None else Path(move_to)
    if target is not None:
        _check_target(root, target, remove)
    files = image_files(root)
    total = len(files.images)
    if not total:
        raise UserError(
            f"{str(root)!r} has no image file", "Name the folder that holds the classes' folders."
        )
    findings: list[Finding] = []
    for done, finding in enumerate(_inspect_all(files.images, jfif_only), start=1):
        findings += [] if finding is None else [finding]
        progress(done, total)
    report = Report(root, total, files.ignored, tuple(findings))
    if remove:
        return _remove(report)
    return report if target is None else _move(report, target)


def main_check(
    directory: Path | str,
    jfif_only: bool = False,
    remove: bool = False,
    move_to: Path | str | None = None,
    json: bool = False,
) -> int:
    """Check, print counts and names, and return the exit code.

    0: every file is good, or every bad one was removed or moved. 1: bad files are left. 2: the
    user's mistake, told on standard error. With ``json`` the last line has it all as JSON.
    """
    try:
        with Progress() as progress:
            report = check_folder(
                directory,
                jfif_only=jfif_only,
                remove=remove,
                move_to=move_to,
                progress=progress.update,
            )
    except UserError as error:
        return show(error)
    print(as_text(report))
    if json:
        print(as_json(report))
    return 1 if report.left else 0


def as_text(report: Report) -> str:
    """The report for a reader: names, counts per kind, and what was done, a line each."""
    failed = dict(report.failed)
    lines = [f"{f.kind}: {f.path} ({f.detail})" for f in report.findings]
    lines += [f"{kind}: {number}" for kind, number in report.kinds.items()]
    lines += [f"left in place: {path} ({reason})" for path, reason in failed.items()]
    ignored = f" ({report.ignored} others passed over by name)" if report.ignored else ""
    lines.append(
        f"checked {report.checked} image files in {report.directory}{ignored}: "
        f"{len(report.findings)} bad, {len(report.removed)} removed, {len(report.moved)} moved"
    )
    # A file's name may hold bytes that are no text; they must not stop the report.
    return "\n".join(lines).encode("utf-8", "backslashreplace").decode()


def as_json(report: Report) -> str:
    """The report as one line of JSON."""
    figures: dict[str, Any] = {
        "directory": str(report.directory),
        "checked": report.checked,
        "ignored": report.ignored,
        "bad": len(report.findings),
        "left": report.left,
        "kinds": report.kinds,
        "findings": [
            {"path": str(f.path), "kind": f.kind, "detail": f.detail} for f in report.findings
        ],
        "removed": [str(path) for path in report.removed],
        "moved": [{"from": str(old), "to": str(new)} for old, new in report.moved],
        "failed": [{"path": str(path), "reason": reason} for path, reason in report.failed],
    }
    return dumps(figures)


def _inspect_all(paths: tuple[str, ...], jfif_only: bool) -> Iterator[Finding | None]:
    """`inspect` each of ``paths``, in their order, on several threads."""
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        for start in range(0, len(paths), _WAVE):
            yield from pool.map(lambda p: inspect(p, jfif_only), paths[start : start + _WAVE])


def _check_target(root: Path, target: Path, remove: bool) -> None:
    if remove:
        raise UserError(
            f"--remove and --move-to {str(target)!r} exclude each other", "Choose one of them."
        )
    if target.resolve().is_relative_to(root.resolve()):
        raise UserError(
            f"--move-to {str(target)!r} lies inside the folder that is checked, {str(root)!r}",
            "Choose a directory outside of it, or training would read the files there.",
        )
    existing = next(p for p in (target.resolve(), *target.resolve().parents) if p.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise UserError(
            f"--move-to {str(target)!r} cannot be written: "
            f"{str(existing)!r} is no writable directory",
            "Choose another one.",
        )


def _remove(report: Report) -> Report:
    removed: list[Path] = []
    failed: list[tuple[Path, str]] = []
    for finding in report.findings:
        try:
            finding.path.unlink()
            removed.append(finding.path)
        except OSError as error:
            failed.append((finding.path, error.strerror or str(error)))
    return replace(report, removed=tuple(removed), failed=tuple(failed))


def _move(report: Report, target: Path) -> Report:
    moved: list[tuple[Path, Path]] = []
    failed: list[tuple[Path, str]] = []
    for finding in report.findings:
        try:
            destination = _take_name(target / finding.path.relative_to(report.directory))
            try:
                shutil.move(finding.path, destination)
            except BaseException:
                destination.unlink()
                raise
            moved.append((finding.path, destination))
        except OSError as error:
            failed.append((finding.path, error.strerror or str(error)))
    return replace(report, moved=tuple(moved), failed=tuple(failed))


def _take_name(wanted: Path) -> Path:
    """A new empty file at ``wanted``, or with a number in its name if that one exists."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    name, numbers = wanted, count(1)
    while True:
        try:
            name.touch(exist_ok=False)  # takes the name at once, so that nothing is overwritten
        except FileExistsError:
            name = wanted.with_stem(f"{wanted.stem}-{next(numbers)}")
        else:
            return name
