"""The command ``spartito report``: the page of a run, a comparison or a survey of faults."""

from __future__ import annotations

import os
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from spartito.cli.options import switch, value
from spartito.errors import UserError
from spartito.notes import say
from spartito.system import IS_MAC

COMPARISON, REPORT = "compare.html", "report.html"
READ = ("config.json", "history.jsonl", "evaluations.jsonl")
"""What the report of a run is made of."""


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run, or of a comparison.")
    ],
    open: Annotated[bool, switch("--open", "Show it in the browser.")] = False,
    plan: Annotated[
        Path | None, value("What spartito plan --out wrote: show it beside.", "DIR")
    ] = None,
) -> None:
    """Write the report of a run, and open it.

    It is made from the files of the folder, as far as the run has come.

    Example: spartito report runs/mnist --open
    """
    path = page_of(run, plan)
    print(path)
    if open and not shown(path, os.environ):
        say("no browser can be opened here: open the file by hand")


def page_of(run: Path, plan: Path | None = None) -> Path:
    """The page of a folder; that of a run is written anew where something is newer.

    Args:
        run: The folder.
        plan: What predicted the run; then its page is written anew.

    Returns:
        Its path.

    Raises:
        UserError: There is nothing to report.
    """
    if not run.is_dir():
        raise UserError(f"{run} is no folder", "Name the run folder: --out, or Trainer(run_dir).")
    if (run / COMPARISON).is_file():
        if plan is not None:
            raise UserError(
                f"--plan for {run}, which is a comparison",
                "Write spartito plan SCRIPT --check DIR.",
            )
        return run / COMPARISON
    page, files = run / REPORT, [run / name for name in READ if (run / name).exists()]
    if plan is None and page.exists() and all(_written(page) >= _written(file) for file in files):
        return page
    from spartito.report import write_report

    return write_report(run, plan)


def shown(page: Path, env: Mapping[str, str], is_mac: bool = IS_MAC) -> bool:
    """Whether a browser with windows shows the page now.

    Args:
        page: The file.
        env: Where a display and a browser are named.
        is_mac: Whether windows need no display there.
    """
    display = is_mac or any(env.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    # Without a display the module would start a browser of the terminal, and wait for it.
    return display and webbrowser.open(page.resolve().as_uri())


def _written(file: Path) -> int:
    return file.stat().st_mtime_ns
