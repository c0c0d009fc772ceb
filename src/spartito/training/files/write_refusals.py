"""What disks and stores have refused, by destination, and what that leaves at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from spartito.errors import UserError


@dataclass(frozen=True)
class Destination:
    """A folder that automatic saves write into.

    Attributes:
        refused: How many could not be written since one was.
        why: The error of the last of them.
        written: The global step of the newest that was written; None: none was.
        keeps: Whether what it holds outlives the training.
    """

    refused: int = 0
    why: str = ""
    written: int | None = None
    keeps: bool = True

    def after_refusal(self, why: str, keeps: bool) -> Destination:
        """One more was refused."""
        return replace(self, refused=self.refused + 1, why=why, keeps=keeps)

    def after_success(self, step: int, keeps: bool) -> Destination:
        """One was written."""
        return Destination(written=step, keeps=keeps)


def what_is_lost(destinations: Mapping[Path, Destination], step: int) -> tuple[str, bool]:
    """What is to be said at the end of a training.

    Args:
        destinations: All that its callbacks have written into, or tried to.
        step: The global step at which it ended.

    Returns:
        A sentence for each destination whose last save was refused, "" without one; and whether
        no other has the trained model either.
    """
    kept = {path: one for path, one in destinations.items() if one.keeps}
    lost = {path: one for path, one in kept.items() if one.refused}
    return "; ".join(_sentences(lost, step)), bool(lost) and len(lost) == len(kept)


def _sentences(lost: Mapping[Path, Destination], step: int) -> Iterable[str]:
    for path, one in lost.items():
        times = "the last checkpoint" if one.refused == 1 else f"the last {one.refused} checkpoints"
        newest = (
            "none was written to its end"
            if one.written is None
            else f"the newest is of step {one.written}"
        )
        yield f"{times} of {step} steps could not be written into {path}, where {newest}: {one.why}"


def reason_of(error: UserError) -> str:
    """The first line of an error, without what to do about it."""
    return str(error).partition("\n")[0]
