"""Pages of the site that are made from what stands elsewhere: the command line, and root files."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]
FROM_ROOT = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "reporting.md": "SECURITY.md",
}
OUTSIDE = re.compile(
    r"\[([^\]]+)\]\(((?:\.\./)*(?:src|tests|examples|benchmarks|scripts|docker)/[^)]*)\)"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in ``docs/``; called by mkdocs."""
    for page, source in FROM_ROOT.items():
        text = (ROOT / source).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "reference/command-line.md", content=command_line()))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links to sources have no page on the site: they become names. Called by mkdocs."""
    named = OUTSIDE.sub(lambda link: f"{link[1]} (`{link[2].lstrip('./')}`)", markdown)
    for page, source in (*FROM_ROOT.items(), ("index.md", "README.md")):
        named = re.sub(rf"\]\((\.\./)?{source}(#[^)]*)?\)", f"]({page})", named)
    return named


def command_line() -> str:
    """The help of every command, as Markdown."""
    from typer.cli import app as typer_app

    from spartito.cli import app as _ours  # noqa: F401 - a broken command line fails here

    arguments = ["spartito.cli.app", "utils", "docs", "--name", "spartito"]
    found = CliRunner().invoke(typer_app, arguments, catch_exceptions=False)
    if found.exit_code:
        raise RuntimeError(found.output)
    return found.output
