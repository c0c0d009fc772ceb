"""A run folder that has an earlier run of a recipe: what to do with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from spartito.errors import UserError
from spartito.folders import check_free
from spartito.names import ENV_QUEUED_AGAIN, ENV_RESUME

SAVED = ("checkpoints/*/manifest.json", "backup/fit-*/*/manifest.json")
FIGURES = "history.jsonl"


def vacate(out: Path, overwrite: bool, env: Mapping[str, str]) -> Path | None:
    """Let a run that begins anew have its folder for itself.

    A job that is put into a queue again goes on with what is there, and so does a pod.

    Args:
        out: The run folder.
        overwrite: Whether an earlier run in it is moved aside.
        env: The environment of the job.

    Returns:
        Where the earlier run is now; None where there was none.

    Raises:
        UserError: There is one, and it shall stay; or the folder is in use, or cannot be moved.
    """
    again = any(env.get(name, "0") != "0" for name in (ENV_QUEUED_AGAIN, ENV_RESUME))
    if again or not (found := holds_run(out)):
        return None
    if not overwrite:
        goes_on = "--resume goes on with it, " if found != FIGURES else ""
        raise UserError(
            f"--out {out} has an earlier run ({found}), and two would mix there",
            f"{goes_on}--overwrite moves it aside and begins anew; or name another --out.",
        )
    check_free(out)
    aside = next(one for n in range(1, 10**6) if not (one := _numbered(out, n)).exists())
    try:
        out.rename(aside)
    except OSError as error:
        raise UserError(
            f"--overwrite: {out} cannot be moved to {aside}: {error.strerror}",
            "Name another --out.",
        ) from error
    return aside


def holds_run(out: Path) -> str:
    """What a folder has of an earlier run; empty where nothing would be lost."""
    for kind in SAVED:
        if found := next(out.glob(kind), None):
            return str(found.parent.relative_to(out))
    file = out / FIGURES
    return FIGURES if file.is_file() and file.stat().st_size else ""


def _numbered(out: Path, number: int) -> Path:
    path = out.absolute()
    return path.with_name(f"{path.name}.{number}")
