"""What came of a suite, as a page of text and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spartito.chaos.picture import kinds, picture
from spartito.chaos.schedule import KINDS
from spartito.chaos.suite import read_results
from spartito.names import plural
from spartito.storage.atomic import write_file_atomically
from spartito.storage.own_files import begins_with, check_own, contains

PAGE, PICTURE = "survival.md", "survival.svg"
HEAD = "| fault | task | step | ended with | seconds | again | repeated | lost | doubled | loss | |"
RULE = "|---|---|---|---|---|---|---|---|---|---|---|"


def write_page(out: Path) -> Path | None:
    """Write the page and the picture of the results in a folder.

    Args:
        out: the folder of a suite.

    Returns:
        The page; None without results.
    """
    results = read_results(out)
    if not results:
        return None
    check_own(
        out, {PICTURE: contains("What jobs survive"), PAGE: begins_with("![What jobs survive](")}
    )
    write_file_atomically(out / PICTURE, picture({"": results}))
    write_file_atomically(out / PAGE, f"![What jobs survive]({PICTURE})\n\n{page(results)}")
    return out / PAGE


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """The page: a table for each strategy, a row for each run.

    Args:
        results: as `read_results` has them.

    Returns:
        Markdown.
    """
    return (
        "\n\n".join([summary(results), *tables(results), f"## Faults\n\n{legend(results)}"]) + "\n"
    )


def tables(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table for each strategy, below a heading of the second level.

    Args:
        results: as `read_results` has them.

    Returns:
        Markdown, one text for each table.
    """
    parts = []
    for name in dict.fromkeys(result["strategy"] for result in results):
        rows = [row(result) for result in results if result["strategy"] == name]
        parts.append("\n".join([f"## {name}", "", HEAD, RULE, *rows]))
    return parts


def legend(results: Sequence[Mapping[str, Any]]) -> str:
    """What each kind of fault among the results is.

    Args:
        results: as `read_results` has them.

    Returns:
        A list in Markdown.
    """
    seen = {kind for result in results for kind in kinds(result)}
    return "\n".join(f"* **{kind}**: {KINDS[kind].about}" for kind in KINDS if kind in seen)


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """One sentence on all of them."""
    broken = sum(bool(result["broken"]) for result in results)
    count = len({result["strategy"] for result in results})
    left_out = sum(result["lost"] for result in results if kinds(result) == ["nan"])
    lost = sum(result["lost"] for result in results) - left_out
    said = (
        f"{len(results) - broken} of {len(results)} runs under "
        f"{plural(count, 'strategy', 'strategies')} ended as promised; {lost} steps were lost."
    )
    if left_out:
        said += f" {left_out} updates that were not finite were left out, as asked."
    return said


def row(result: Mapping[str, Any]) -> str:
    """One row of a table."""
    schedule = str(result["schedule"])
    faults = [one.partition("@") for one in schedule.split("+")]
    tasks = ", ".join(rest.partition("#")[0].replace(":", " ") for _, _, rest in faults)
    steps = ", ".join(rest.partition("#")[2] for _, _, rest in faults)
    off = result["difference"]
    difference = (
        "?" if off is None or math.isnan(off) else "the same" if off == 0 else f"{off:+.2g}"
    )
    seconds = result["seconds"]
    cells = [
        ", then ".join(kinds(result)),
        tasks,
        steps,
        "hung" if result["code"] is None else str(result["code"]),
        "?" if seconds is None or math.isnan(seconds) else f"{seconds:.1f}",
        str(result["restarts"]),
        str(result["repeated"]),
        str(result["lost"]),
        str(result["doubled"]),
        difference,
        "; ".join(result["broken"]).replace("|", "/") or "as promised",
    ]
    return f"| {' | '.join(cells)} |"
