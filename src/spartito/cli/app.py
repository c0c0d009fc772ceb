"""The command ``spartito``: the one that is typed is imported, and never torch to start."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer

from spartito.cli.command import Command, Group
from spartito.cli.commands import COMMANDS
from spartito.cli.completion import ENV_COMPLETE, complete, install, script_for, with_shell
from spartito.cli.mistakes import as_mistake
from spartito.errors import EXIT_INTERRUPTED, SpartitoError, show

PASS_ON = {"allow_interspersed_args": False}
"""Everything after the script belongs to the script, options too."""

HELP = """Train any PyTorch model under any distribution strategy.

Example: spartito train mnist --strategy mirrored --workers 2

Example: spartito run --strategy mirrored --workers 2 train.py --epochs 3
"""
USAGE_ERROR: type[Exception]
[USAGE_ERROR] = typer.BadParameter.__bases__  # which has no public name of its own


def application(words: Sequence[str]) -> typer.Typer:
    """The command ``spartito``, with the one of its commands that ``words`` begin with, or all."""
    app = typer.Typer(
        cls=Group,
        help=HELP,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        callback=_spartito,
    )
    named = [words[0]] if words and words[0] in COMMANDS else COMMANDS
    for name in named:
        module, _, attribute = COMMANDS[name].partition(":")
        command = getattr(import_module(module), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            settings = PASS_ON if name == "run" else None
            app.command(name, cls=Command, context_settings=settings)(command)
    return app


def __getattr__(name: str) -> typer.Typer:
    """``app``, the whole command: what tools look for that write its documentation."""
    if name == "app":
        return application([])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (by default the process's own); returns the exit code."""
    words = with_shell(_asked(sys.argv[1:] if argv is None else argv), os.environ)
    _open_streams()
    try:
        if (shell := os.environ.get(ENV_COMPLETE)) is not None:
            return complete(shell, application)
        code = application(words)(args=words, prog_name="spartito", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except USAGE_ERROR as error:
        return show(as_mistake(error))
    except SpartitoError as error:
        return show(error)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    finally:
        _flush_streams()


def _asked(words: Sequence[str]) -> list[str]:
    """The words in full: ``help COMMAND`` and ``version``, as people type them elsewhere, too."""
    if list(words) == ["version"]:
        return ["--version"]
    if words[:1] == ["help"]:
        return [*words[1:], "--help"]
    alone = not words or (len(words) == 1 and COMMANDS.get(words[0], "").endswith("_app"))
    return [*words, "--help"] if alone else [*words]


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


def _install(shell: str | None) -> None:
    if shell is not None:
        for line in install(shell, os.environ):
            typer.echo(line)
        raise typer.Exit


def _show_script(shell: str | None) -> None:
    if shell is not None:
        typer.echo(script_for(shell))
        raise typer.Exit


def _instead(
    option: str, help: str, callback: Callable[[Any], None], metavar: str | None = None
) -> Any:
    """An option that does something instead of a command."""
    return typer.Option(option, help=help, metavar=metavar, callback=callback, is_eager=True)


_TAB = "Have the TAB key complete commands, options, strategies and recipes."
_SCRIPT = "Print what that would install, for bash, zsh or fish."


def _spartito(
    show_version: Annotated[
        bool, _instead("--version", "Print the version.", _print_version)
    ] = False,
    install_completion: Annotated[
        str | None, _instead("--install-completion", _TAB, _install, "[SHELL]")
    ] = None,
    show_completion: Annotated[
        str | None, _instead("--show-completion", _SCRIPT, _show_script, "[SHELL]")
    ] = None,
) -> None:
    pass
