"""The command ``spartito``: the one that is typed is imported, and never torch to start."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from typing import Annotated

import typer

from spartito.errors import EXIT_INTERRUPTED, SpartitoError, show

PASS_ON = {"allow_interspersed_args": False}
"""Everything after the script belongs to the script, options too."""

HELP = """Train any PyTorch model under any distribution strategy.

Example: spartito train mnist --strategy mirrored --workers 2
"""
COMMANDS = {
    "run": "spartito.cli.run:run",
    "train": "spartito.cli.run:train",
    "plan": "spartito.cli.plan:plan",
    "compare": "spartito.cli.compare:compare",
    "chaos": "spartito.cli.chaos:chaos",
    "doctor": "spartito.cli.doctor:doctor",
    "top": "spartito.cli.top:top",
    "predict": "spartito.cli.data:predict",
    "data": "spartito.cli.data:data_app",
    "checkpoint": "spartito.cli.checkpoint:checkpoint_app",
    "cluster": "spartito.cli.cluster:cluster_app",
}
"""Where each command is: only the one that is typed is imported."""


def application(words: Sequence[str]) -> typer.Typer:
    """The command ``spartito``, with the one of its commands that ``words`` begin with, or all."""
    app = typer.Typer(
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        callback=_spartito,
    )
    named = [words[0]] if words and words[0] in COMMANDS else COMMANDS
    for name in named:
        module, _, attribute = COMMANDS[name].partition(":")
        command = getattr(import_module(module), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, context_settings=PASS_ON if name == "run" else None)(command)
    return app


def __getattr__(name: str) -> typer.Typer:
    """``app``, the whole command: what tools look for that write its documentation."""
    if name == "app":
        return application([])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (by default the process's own); returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    try:
        application(words)(args=words, prog_name="spartito")
    except SpartitoError as error:
        return show(error)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        _flush_streams()
    return 0


def _open_streams() -> None:
    """Let streams that were closed (``>&-``) go nowhere, else files that we open get them."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))


def _flush_streams() -> None:
    """Let go of what cannot be written: the interpreter would say so, and end with another code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"spartito {version('spartito')}")
        raise typer.Exit


def _spartito(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass
