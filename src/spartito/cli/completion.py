"""What the TAB key completes: commands, options, strategies with their options, recipes, files.

The shell asks ``spartito`` with its name in ``_SPARTITO_COMPLETE`` and the line up to the cursor
in ``_SPARTITO_LINE`` (zsh: the words, a line each), and gets a line for each word: the word, a
tab, what it means. A line with a tab alone says that names of files may stand there as well. Only
the command that is typed is imported, and never torch.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from spartito.cli.command import is_argument
from spartito.errors import UserError
from spartito.launch.on_ray.job import PLACEMENTS
from spartito.names import PRECISIONS, RECIPES, nearest
from spartito.registry import nesting_names, strategy_info, strategy_names

ENV_COMPLETE, ENV_LINE = "_SPARTITO_COMPLETE", "_SPARTITO_LINE"
MARK = "# spartito: completion"
"""By this a file or a line is known as ours."""
VALUES: Mapping[str, Sequence[str]] = {
    "recipe": RECIPES,
    "target": RECIPES,
    "precision": tuple(PRECISIONS),
    "log_format": ("text", "json"),
    "placement": PLACEMENTS,
    "on": ("processes", "compose"),
    "format": ("parquet", "webdataset", "jsonl"),
}
"""What arguments and options may be, by their names, beside strategies."""
IN_FILES = re.compile(r"FILE|DIR|PATH|RUN|OUT|SRC|URL|SCRIPT|ARGS|IMAGE")
"""The metavars for which the name of a file may stand."""
Word = tuple[str, str]

BASH = f"""{MARK}
_spartito() {{
    local cur="$2" word about files="" IFS=$'\\n'
    COMPREPLY=()
    while IFS=$'\\t' read -r word about; do
        if [ -z "$word" ]; then files=1; else COMPREPLY+=("$word"); fi
    done < <({ENV_COMPLETE}=bash {ENV_LINE}="${{COMP_LINE:0:COMP_POINT}}" "$1" 2>/dev/null)
    case "${{COMPREPLY[*]}}" in *[=\\(,]) compopt -o nospace 2>/dev/null ;; esac
    [ -n "$files" ] || return 0
    compopt -o filenames 2>/dev/null
    COMPREPLY+=($(compgen -f -- "$cur"))
}}
complete -F _spartito spartito
"""
ZSH = f"""#compdef spartito
{MARK}
_spartito() {{
    local -a words_ spaced; local word about files line
    line="${{(F)${{(@Q)words[1,CURRENT-1]}}}}"$'\\n'"$PREFIX"
    while IFS=$'\\t' read -r word about; do
        if [[ -z $word ]]; then files=1
        elif [[ $word == (*=|*\\() ]]; then words_+=("$word")
        else spaced+=("${{word//:/\\\\:}}:$about"); fi
    done < <({ENV_COMPLETE}=zsh {ENV_LINE}="$line" spartito 2>/dev/null)
    (( $#words_ )) && compadd -S '' -- "${{words_[@]}}"
    (( $#spaced )) && _describe spartito spaced
    [[ -n $files ]] && _files
}}
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}
compdef _spartito spartito
"""
FISH = f"""{MARK}
function __spartito_words
    set -lx {ENV_COMPLETE} fish
    set -lx {ENV_LINE} (commandline -cp | string collect)
    set -l found (spartito 2>/dev/null)
    for line in $found
        if string match -q -r '^\\t' -- $line
            __fish_complete_path (commandline -ct)
        else
            echo $line
        end
    end
end
complete --command spartito --no-files --arguments '(__spartito_words)'
"""
SCRIPTS = {"bash": BASH, "fish": FISH, "zsh": ZSH}


def script_for(shell: str) -> str:
    """What a shell runs to complete ``spartito``; `UserError` for one that we do not know."""
    if shell not in SCRIPTS:
        raise UserError(f"{shell!r} is not a shell that completes", nearest(shell, SCRIPTS))
    return SCRIPTS[shell]


def with_shell(words: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """The words, with the user's shell where ``--install-completion`` names none."""
    alone = [*words[-1:]] in (["--install-completion"], ["--show-completion"])
    return [*words, Path(env.get("SHELL", "bash")).name] if alone else [*words]


def install(shell: str, env: Mapping[str, str]) -> Iterator[str]:
    """Write the script where the shell finds it, and one line into its own settings if it must.

    Args:
        shell: Its name.
        env: Where its folders are.

    Yields:
        What was done, a sentence each.

    Raises:
        UserError: Another's file is there, or nothing can be written.
    """
    script, home = script_for(shell), Path(env.get("HOME") or "~").expanduser()
    data = Path(env.get("XDG_DATA_HOME") or home / ".local" / "share")
    config = Path(env.get("XDG_CONFIG_HOME") or home / ".config")
    file, settings = {
        "bash": (data / "bash-completion" / "completions" / "spartito", home / ".bashrc"),
        "zsh": (data / "spartito" / "completion.zsh", Path(env.get("ZDOTDIR") or home) / ".zshrc"),
        "fish": (config / "fish" / "completions" / "spartito.fish", None),
    }[shell]
    try:
        if file.exists() and MARK not in file.read_text(errors="replace"):
            raise UserError(
                f"{file} is there, and Spartito did not write it",
                f"Move it away, or use spartito --show-completion {shell}.",
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(script)
        yield f"wrote {file}"
        if settings is not None:
            quoted = shlex.quote(str(file))
            yield _with_line(settings, f"[ ! -f {quoted} ] || source {quoted}  {MARK}")
    except OSError as error:
        raise UserError(
            f"{error.filename}: {error.strerror}",
            f"Put what spartito --show-completion {shell} prints where {shell} reads it.",
        ) from error
    yield f"It works in the next {shell} that you start."


def _with_line(settings: Path, line: str) -> str:
    """Append a line to a user's file, unless it is there; nothing else in it changes."""
    text = settings.read_text(errors="replace") if settings.exists() else ""
    if line in text.splitlines():
        return f"{settings} has its line already"
    with settings.open("a") as file:
        file.write(f"{'' if text.endswith(chr(10)) or not text else chr(10)}{line}\n")
    return f"added a line to {settings}: {line}"


def complete(shell: str, application: Callable[[Sequence[str]], typer.Typer]) -> int:
    """Print what may stand at the cursor; returns the exit code.

    Args:
        shell: Which asks.
        application: Makes the command of the words that are typed.
    """
    line = os.environ.get(ENV_LINE, "")
    (*typed, word), is_quoted = (line.split("\n"), False) if shell == "zsh" else _split(line)
    words = found(typed[1:], word, application)
    if shell == "bash":
        # bash takes what stands behind a "=" for a word of its own.
        cut = word.rfind("=") + 1 if word.startswith("-") else 0
        words = [(text[cut:], about) for text, about in words]
        # It closes the quotes of a word that may go on in one way alone.
        if is_quoted and len(words) == 1 and words[0][0]:
            words.append((f"{words[0][0]}{'(' if words[0][0][-1].isalpha() else '...'}", ""))
    for text, about in words:
        print(f"{text}\t{about}")
    return 0


def found(
    typed: Sequence[str], word: str, application: Callable[[Sequence[str]], typer.Typer]
) -> list[Word]:
    """What may stand behind the words ``typed`` and begins with ``word``, and what each means.

    Args:
        typed: The words after ``spartito``, without the last.
        word: The last, which may be empty.
        application: Makes the command of the words that are typed.

    Returns:
        The words; an empty one stands for the names of files.
    """
    command: Any = typer.main.get_command(application(typed or [word]))
    while hasattr(command, "commands"):
        if not typed:
            commands = ((name, _about(one)) for name, one in command.commands.items())
            return _beginning(word, [*commands, *(_flags(command) if word[:1] == "-" else ())])
        if typed[0] not in command.commands:
            return []
        command, typed = command.commands[typed[0]], typed[1:]
    return _beginning(word, _of_command(command, typed, word))


def _beginning(word: str, words: Iterable[Word]) -> list[Word]:
    return [one for one in words if one[0].startswith(word) or not one[0]]


def _of_command(command: Any, typed: Sequence[str], word: str) -> Iterator[Word]:
    options = {flag: one for one in command.params if not is_argument(one) for flag in one.opts}
    arguments = [one for one in command.params if is_argument(one)]
    passes_on = command.context_settings.get("allow_interspersed_args") is False
    given, open_option = 0, None
    for one in typed:
        if open_option is not None:
            open_option = None
        elif passes_on and given:
            break
        elif one == "--":
            yield "", ""  # the script's own
            return
        elif one in options:
            open_option = None if options[one].is_flag else options[one]
        elif not one.startswith("-"):
            given += 1
    name, is_joined, value = word.partition("=")
    if passes_on and given:
        yield "", ""
    elif open_option is not None:
        yield from values(open_option, word)
    elif is_joined and name in options:
        for text, about in values(options[name], value):
            yield f"{name}={text}" if text else "", about
    elif word.startswith("-"):
        yield from _flags(command)
    elif arguments:
        yield from values(arguments[min(given, len(arguments) - 1)], word)


def values(parameter: Any, word: str) -> Iterator[Word]:
    """What an argument or an option may be, where that is known.

    Args:
        parameter: Which.
        word: How it begins.

    Yields:
        The words; an empty one stands for the names of files.
    """
    if parameter.name in ("strategy", "strategies"):
        yield from _strategies(word)
    yield from ((one, "") for one in VALUES.get(parameter.name, ()))
    if IN_FILES.search(parameter.metavar or ""):
        yield "", ""


def _strategies(word: str) -> Iterator[Word]:
    """How the text of a strategy may go on: a name, or in parentheses an option of it."""
    opened = _opened(word)
    if opened is None:
        start = re.sub(r"[^,)\s]*$", "", word)
        yield from ((start + name, "") for name in strategy_names())
        return
    outer, inside = re.split(r"\W", word[:opened])[-1], word[opened + 1 :]
    key = inside.rpartition(",")[2].lstrip()
    start = word[: len(word) - len(key)]
    if key.startswith("inside="):
        yield from ((f"{start}inside={name}", "") for name in nesting_names())
    elif outer in strategy_names() and "=" not in key:
        yield from ((f"{start}{option}=", "") for option in strategy_info(outer).options or ())


def _opened(text: str) -> int | None:
    """Where the innermost parenthesis stands that is not closed yet."""
    found: list[int] = []
    for index, letter in enumerate(text):
        if letter == "(":
            found.append(index)
        elif letter == ")" and found:
            found.pop()
    return found[-1] if found else None


def _flags(command: Any) -> Iterator[Word]:
    for one in command.params:
        if not is_argument(one) and not one.hidden:
            yield from ((flag, _first(one.help)) for flag in one.opts if flag.startswith("--"))
    yield "--help", "Show what there is."


def _about(command: Any) -> str:
    return _first(command.help)


def _first(help: str | None) -> str:
    """The first sentence of a help."""
    return re.split(r"(?<=[.;:]) |\n", help or "")[0].rstrip(".;:")


def _split(line: str) -> tuple[list[str], bool]:
    """The words of a line, the last of which may be half typed; whether its quotes are open."""
    words: list[str] = []
    word, quote, begun = "", "", False
    for letter in line:
        if quote:
            quote, word = ("", word) if letter == quote else (quote, word + letter)
        elif letter in "'\"":
            quote, begun = letter, True
        elif not letter.isspace():
            word += letter
        elif word or begun:
            words, word, begun = [*words, word], "", False
    return [*words, word] if words else ["spartito", word], bool(quote)
