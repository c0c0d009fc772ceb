"""The command ``spartito top``: how the tasks of a run go, as a living table or for Prometheus."""

from __future__ import annotations

import json as json_
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spartito.cli.options import switch, value
from spartito.errors import UserError
from spartito.names import FOR_DATA, FOR_TASKS, RATE
from spartito.notes import say
from spartito.status import OVER, SILENCE, Status, statuses
from spartito.wire.addresses import split_address

if TYPE_CHECKING:
    from rich.table import Table

EVERY = 1.0
HEADS = ("task", "phase", "step", RATE, FOR_TASKS, FOR_DATA, "staleness", "memory", "last")
CONTENT = "text/plain; version=0.0.4; charset=utf-8"


def top(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    once: Annotated[bool, switch("--once", "Print the table once.")] = False,
    json: Annotated[bool, switch("--json", "Print one line of JSON, once.")] = False,
    listen: Annotated[
        str | None,
        value("Give the same figures to Prometheus at this address: its /metrics.", "HOST:PORT"),
    ] = None,
) -> None:
    """Show how each task of a run goes.

    The table lives until Ctrl-C, or until the tasks have ended.

    Example: spartito top runs/mnist
    """
    if not run.is_dir():
        raise UserError(f"{run} is no folder", "Name the run folder: --out, or Trainer(run_dir).")
    if listen is not None:
        _serve(run, listen)
    elif json:
        print(json_.dumps([record(run, status) for status in statuses(run)]))
    elif once:
        show(run)
    else:
        _follow(run)


def record(run: Path, status: Status) -> dict[str, Any]:
    """The figures of a task, as JSON has them; one that ended or is silent does nothing."""
    if status.shown_phase in (OVER, SILENCE):
        status = replace(status, steps_per_second=0.0, waiting=0.0, data=0.0)
    rate = {"examples_per_second": status.steps_per_second * examples_of_step(run)}
    return {**asdict(status), "phase": status.shown_phase, "age": status.age, **rate}


def examples_of_step(run: Path) -> float:
    """The examples that one worker computes in a step, as the chief wrote; 0 before that."""
    try:
        config = json_.loads((run / "config.json").read_text())
        return float(config["fit"]["batch_size"] or 0) / int(config["cluster"]["replicas"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def metrics(run: Path) -> str:
    """The figures as Prometheus reads them."""
    kinds = {
        "step": ("gauge", "The global step; of a parameter server its updates.", "step"),
        "examples_per_second": ("gauge", "Of this task, lately.", "examples_per_second"),
        "waiting_ratio": ("gauge", "Part of the time in which it waits for tasks.", "waiting"),
        "data_wait_ratio": ("gauge", "Part of the time in which it waits for data.", "data"),
        "staleness": ("gauge", "Updates between pull and push, in the mean.", "staleness"),
        "memory_bytes": ("gauge", "What it has in RAM.", "memory"),
        "heartbeat_age_seconds": ("gauge", "Since it said something last.", "age"),
    }
    records = [record(run, status) for status in statuses(run)]
    lines: list[str] = []
    for name, (kind, about, key) in kinds.items():
        lines += [f"# HELP spartito_{name} {about}", f"# TYPE spartito_{name} {kind}"]
        for one in records:
            if one[key] is not None:
                lines.append(f'spartito_{name}{{task="{one["task"]}"}} {one[key]:.15g}')
    lines += ["# HELP spartito_phase What it is at.", "# TYPE spartito_phase gauge"]
    lines += [f'spartito_phase{{task="{one["task"]}",phase="{one["phase"]}"}} 1' for one in records]
    return "\n".join(lines) + "\n"


def cells(one: dict[str, Any]) -> Iterator[str]:
    """A task's row of the table."""
    works = one["steps_per_second"] > 0
    yield one["task"]
    yield one["phase"]
    yield f"{one['step']:,}"
    yield f"{one['examples_per_second']:,.0f}" if works and one["examples_per_second"] else ""
    yield f"{one['waiting']:.0%}" if works else ""
    yield f"{one['data']:.0%}" if works else ""
    yield "" if one["staleness"] is None else f"{one['staleness']:.2f}"
    yield f"{one['memory'] / 1e6:,.0f} MB"
    yield f"{one['age']:.0f} s ago"


def _table(run: Path, found: Sequence[Status]) -> Table:
    from rich.table import Table

    table = Table(title=str(run), title_justify="left", box=None, pad_edge=False)
    for head in HEADS:
        table.add_column(head, justify="left" if head in ("task", "phase") else "right")
    for status in found:
        table.add_row(*cells(record(run, status)))
    return table


def _found(run: Path) -> list[Status]:
    found = statuses(run)
    if not found:
        raise UserError(
            f"no task has written into {run} yet",
            "Tasks of Trainer(run_dir=...) and of recipes do, from their start on.",
        )
    return found


def show(run: Path) -> None:
    """Print the table of a run once.

    Args:
        run: its folder.

    Raises:
        UserError: no task has written into it.
    """
    from rich.console import Console

    width = None if sys.stdout.isatty() else 120
    Console(width=width, highlight=False).print(_table(run, _found(run)))


def _follow(run: Path) -> None:
    from rich.live import Live

    with Live(_table(run, _found(run)), auto_refresh=False, screen=False) as live:
        while True:
            found = _found(run)
            live.update(_table(run, found), refresh=True)
            if all(status.phase == OVER for status in found):
                return
            time.sleep(EVERY)


def _serve(run: Path, listen: str) -> None:
    """Reply to Prometheus until Ctrl-C."""

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = metrics(run).encode() if self.path == "/metrics" else b""
            self.send_response(200 if text else 404)
            self.send_header("Content-Type", CONTENT)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing of each request."""

    host, port = split_address(listen)
    try:
        server = ThreadingHTTPServer((host, port), Metrics)
    except OSError as error:
        raise UserError(f"--listen {listen}: {error.strerror}", "Name a free port.") from error
    with server:
        say(f"http://{host}:{server.server_port}/metrics")
        server.serve_forever()
