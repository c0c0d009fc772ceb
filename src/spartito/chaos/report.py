"""What came of a suite, as a page of text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spartito.chaos.schedule import KINDS
from spartito.chaos.suite import read_results
from spartito.storage.atomic import write_file_atomically

PAGE = "survival.md"
HEAD = "| fault | task | step | ended with | seconds | again | repeated | lost | doubled | loss | |"
RULE = "|---|---|---|---|---|---|---|---|---|---|---|"


def write_page(out: Path) -> Path | None:
    """Write the page of the results in a folder.

    Args:
        out: the folder of a suite.

    Returns:
        The page; None without results.
    """
    results = read_results(out)
    if not results:
        return None
    write_file_atomically(out / PAGE, page(results))
    return out / PAGE


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """The page: a table for each strategy, a row for each run.

    Args:
        results: as `read_results` has them.

    Returns:
        Markdown.
    """
    parts = [summary(results)]
    for name in dict.fromkeys(result["strategy"] for result in results):
        rows = [row(result) for result in results if result["strategy"] == name]
        parts.append("\n".join([f"## {name}", "", HEAD, RULE, *rows]))
    kinds = {fault.partition("@")[0] for r in results for fault in r["schedule"].split("+")}
    said = [f"* **{kind}**: {KINDS[kind].about}" for kind in KINDS if kind in kinds]
    parts.append("\n".join(["## Faults", "", *said]))
    return "\n\n".join(parts) + "\n"


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """One sentence on all of them."""
    broken = sum(bool(result["broken"]) for result in results)
    strategies = len({result["strategy"] for result in results})
    return (
        f"{len(results) - broken} of {len(results)} runs under {strategies} strategies ended as "
        f"promised; {sum(result['lost'] for result in results)} steps were lost."
    )


def row(result: Mapping[str, Any]) -> str:
    """One row of a table."""
    schedule = str(result["schedule"])
    faults = [one.partition("@") for one in schedule.split("+")]
    kinds = ", then ".join(kind for kind, _, _ in faults)
    tasks = ", ".join(rest.partition("#")[0].replace(":", " ") for _, _, rest in faults)
    steps = ", ".join(rest.partition("#")[2] for _, _, rest in faults)
    off = result["difference"]
    difference = (
        "?" if off is None or math.isnan(off) else "the same" if off == 0 else f"{off:+.2g}"
    )
    seconds = result["seconds"]
    cells = [
        kinds,
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
