"""Pages of the site that are made from what stands elsewhere: the command line, and root files."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
COMMAND_LINE = "reference/command-line.md"
FROM_ROOT = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "reporting.md": "SECURITY.md",
}
OUTSIDE = re.compile(
    r"\[([^\]]+)\]\(((?:\.\./)*(?:src|tests|examples|benchmarks|scripts|docker)/[^)]*)\)"
)
AT_ROOT = {source: page for page, source in FROM_ROOT.items()} | {"README.md": "index.md"}
LINK_TO_ROOT = re.compile(rf"\]\((?:\.\./)*({'|'.join(map(re.escape, AT_ROOT))})(?:#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in ``docs/``; called by mkdocs."""
    for page, source in FROM_ROOT.items():
        text = (ROOT / source).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, COMMAND_LINE, content=command_line()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Links to sources have no page on the site: they become names. Called by mkdocs."""
    named = OUTSIDE.sub(lambda link: f"{link[1]} (`{link[2].lstrip('./')}`)", markdown)
    here = posixpath.dirname(page.file.src_uri)
    return LINK_TO_ROOT.sub(
        lambda link: f"]({posixpath.relpath(AT_ROOT[link[1]], here or '.')})", named
    )


def command_line() -> str:
    """The page of the command line: each command with its options, in the groups of its help."""
    import typer

    from spartito.cli.app import application

    found = list(_commands(typer.main.get_command(application([])), "spartito"))
    table = [
        f"| [`{name}`](#{name.replace(' ', '-')}) | {_sentences(command)[0]} |"
        for name, command in found
    ]
    return "\n".join(
        [
            "# Command line",
            "",
            "Every command has `--help`. [Exit codes](exit-codes.md) are the same for all.",
            "",
            "| command | what it does |",
            "|---|---|",
            *table,
            *(line for name, command in found for line in _section(name, command)),
        ]
    )


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The commands that can be typed, by what is typed, groups of commands taken apart."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
        return
    for one, each in inner.items():
        if not each.hidden:
            yield from _commands(each, f"{name} {one}")


def _section(name: str, command: Any) -> Iterator[str]:
    """The heading of a command, what it does, how it is typed, and a table for each group."""
    from typer.core import TyperArgument

    shown = [one for one in command.params if not getattr(one, "hidden", False)]
    arguments = [one for one in shown if isinstance(one, TyperArgument)]
    options = [one for one in shown if one not in arguments]
    usage = " ".join([name, *(["[OPTIONS]"] if options else []), *map(_typed, arguments)])
    yield from ("", f"## {name} {{ #{name.replace(' ', '-')} }}", "")
    yield from (" ".join(_sentences(command)), "", "```bash", usage, "```")
    if example := _example(command):
        yield from ("", "Example:", "", "```bash", example, "```")
    if arguments:
        yield from _table("argument", arguments)
    groups: dict[str, list[Any]] = {}
    for option in options:
        groups.setdefault(getattr(option, "rich_help_panel", None) or "", []).append(option)
    for title, members in groups.items():
        if title:
            yield from ("", f"**{title}**")
        yield from _table("option", members)


def _table(kind: str, members: list[Any]) -> Iterator[str]:
    yield from ("", f"| {kind} | default | meaning |", "|---|---|---|")
    for one in members:
        name = f"`{_typed(one)}`" if kind == "argument" else f"`{_spelled(one)}`"
        default = _default(one)
        yield f"| {name} | {default} | {_cell(getattr(one, 'help', None) or '')} |"


def _typed(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return str(name if argument.required or name.startswith("[") else f"[{name}]")


def _spelled(option: Any) -> str:
    names = ", ".join((*option.opts, *option.secondary_opts))
    return f"{names} {option.metavar}" if option.metavar and not option.is_flag else names


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if callable(value) or value is None or value is False or value == () or value == []:
        return ""
    return "" if value is True and parameter.is_flag else f"`{value}`"


def _sentences(command: Any) -> list[str]:
    """The paragraphs of a command's help."""
    paragraphs = re.split(r"\n\s*\n", (command.help or "").strip())
    return [_cell(one) for one in paragraphs]


def _example(command: Any) -> str:
    """The first command that the help of one shows."""
    return (command.epilog or "").partition("\n")[0].removeprefix("Example: ")


def _cell(text: str) -> str:
    """``text`` on one line, for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
