"""What the pages say works: the site builds, their code runs, their commands exist."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import spartito as sp
from spartito.cli.app import app
from tests import skips
from tests.commands import SPARTITO, Commands, commands_in

ROOT = Path(__file__).parents[1]
LONG = 900.0
"""Seconds for one command of a tutorial, on a machine with other work: one compares strategies."""
PAGES = sorted(
    str(page.relative_to(ROOT)) for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
)
STEP_BY_STEP = [
    page for page in PAGES if page.startswith(("docs/tutorials/", "docs/guides/coming-from/"))
]
PLAIN = [
    page
    for page in PAGES
    if page in ("README.md", "docs/index.md")
    or page.startswith(("docs/tutorials/", "docs/reference/strategies/"))
]
MOST_WORDS = 30
"""In a sentence of the pages that are read first; a name or a formula in code is one word."""
OLD = {
    "accelerate": ("before.py", "accelerate"),
    "ddp": ("before.py", "torch"),
    "lightning": ("before.py", "pytorch_lightning"),
}
"""The scripts that a page begins with, and the package that each needs."""
FENCE = re.compile(r"^( *)```(\w*)(?: title=\"(\S+)\")?\n(.*?)^\1```$", re.S | re.M)

TRAINER = """
import torch
import spartito as sp
data = torch.randn(64, 8), torch.randint(3, (64,))
net = torch.nn.Linear(8, 3)
trainer = sp.Trainer(
    net, optimizer=torch.optim.Adam(net.parameters()), loss=torch.nn.CrossEntropyLoss()
)
"""
# What a page's blocks take for granted.
BEFORE = {
    "README.md": """
import torch
def loss_fn(output, target):
    return torch.nn.functional.cross_entropy(output, target, reduction="none")
""",
    "docs/guides/checkpoints.md": TRAINER,
    "docs/guides/interruptions.md": TRAINER,
    "docs/guides/data.md": """
import pathlib, torch, PIL.Image
import spartito as sp
for kind in ("Cat", "Dog"):
    folder = pathlib.Path("PetImages", kind)
    folder.mkdir(parents=True)
    for number in range(20):
        PIL.Image.new("RGB", (200, 190), (number, 9, 9)).save(folder / f"{number}.jpg")
""",
}


@dataclass(frozen=True)
class Block:
    """One fenced block of a page; ``title`` is the file that it is."""

    language: str
    title: str
    text: str


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as started:
        yield started


def blocks(page: str) -> list[Block]:
    found = FENCE.findall((ROOT / page).read_text())
    return [Block(language, title, text) for _, language, title, text in found]


def calls(page: str) -> list[list[str]]:
    """The lines of the page's blocks that call ``spartito``, without what follows in a pipe."""
    lines = [
        line
        for block in blocks(page)
        if block.language in ("", "sh", "bash")
        for line in block.text.replace("\\\n", " ").splitlines()
    ]
    words = [shlex.split(line, comments=True) for line in lines if line.startswith("spartito ")]
    ends = ("|", ">", "&", "&&", ";")
    return [line[: next((i for i, w in enumerate(line) if w in ends), len(line))] for line in words]


@pytest.mark.slow
def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env={"NO_MKDOCS_2_WARNING": "1", "PATH": "/usr/bin:/bin", "PYTHONPATH": "src"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = tmp_path / "reference"
    assert 'id="spartito.Trainer"' in (pages / "api" / "training" / "index.html").read_text()
    assert '<h2 id="spartito-run">' in (pages / "command-line" / "index.html").read_text()
    found = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    assert any("local_sgd" in one["title"] for one in found)


def test_the_page_of_the_command_line_has_every_command_and_option() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "docs_pages.py"))["command_line"]()
    for words, command in typed():
        heading = f"\n## {' '.join(words)} {{"
        assert heading in page
        text = page.partition(heading)[2].partition("\n## ")[0]
        for one in command.params:
            assert one.hidden or f"`{one.opts[0]}" in text or one.opts[0].isidentifier(), one.opts


def typed(*words: str, command: Any = None) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command, by the words that call it."""
    command = typer.main.get_command(app) if command is None else command
    words = words or ("spartito",)
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name, inner in command.commands.items():
        yield from typed(*words, name, command=inner)


def test_the_first_page_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 900


def sentences(page: str) -> Iterator[str]:
    """The sentences of a page's prose: list items and cells of tables are apart."""
    text = re.sub(r"^( *)```.*?^\1```$", "", (ROOT / page).read_text(), flags=re.S | re.M)
    text = re.sub(r"\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"`[^`\n]*`", "code", text)
    for part in re.split(r"\n\s*\n|\n(?=\s*[*#|\d])|(?<!\\)\|", text):
        yield from re.split(r"(?<=[.!?:;])[*)\"]*\s+(?=[A-Z*(]|code)", part)


@pytest.mark.parametrize("page", PLAIN)
def test_the_sentences_of_first_pages_are_short(page: str) -> None:
    assert [one for one in sentences(page) if len(one.split()) > MOST_WORDS] == []


@pytest.mark.parametrize("page", [page for page in PAGES if "/" not in page])
def test_the_links_of_the_first_pages_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


INSIDE = [
    page for page in PAGES if page.startswith(("docs/architecture", "docs/explanation/inside/"))
]


@pytest.mark.parametrize("page", INSIDE)
def test_files_that_the_pages_of_the_code_name_exist(page: str) -> None:
    folders = (ROOT / "src", ROOT / "tests", ROOT / "benchmarks")
    paths = [f"/{path.relative_to(ROOT)}" for folder in folders for path in folder.rglob("*")]
    named = re.findall(r"`([\w/]+\.py|\w+/[\w/]*/)`", (ROOT / page).read_text())
    assert named
    ends = tuple(f"/{name.rstrip('/')}" for name in named if name != "g/3/")
    assert not [end for end in ends if not any(path.endswith(end) for path in paths)]


def test_the_reference_has_every_public_name() -> None:
    pages = (ROOT / "docs" / "reference" / "api").glob("*.md")
    listed = re.findall(r"^::: spartito\.(\w+)$", "".join(p.read_text() for p in pages), re.M)
    names = [name for name in sp.__all__ if not isinstance(getattr(sp, name), ModuleType)]
    modules = {"callbacks", "data", "extend", "launch", "metrics", "models"}
    assert set(names) - modules <= set(listed)


def test_the_page_of_variables_has_those_of_the_sources() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    first = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = re.findall(r"`(SPARTITO_[A-Z_]+)`", "".join(first))
    assert sorted(listed) == sorted(set(re.findall(r'"(SPARTITO_[A-Z]+(?:_[A-Z]+)*)"', sources)))


@pytest.mark.parametrize("page", [page for page in PAGES if calls(page)])
def test_the_commands_of_a_page_exist(page: str) -> None:
    for _, *words in calls(page):
        if "..." in words:  # what follows is left out
            words = words[: words.index("...")]
        _parse(words)


def _parse(words: list[str]) -> None:
    """Whether the command line has the command and the options of ``words``; runs nothing."""
    command: Any = typer.main.get_command(app)
    path = "spartito"
    while hasattr(command, "commands"):
        assert words[0] in command.commands, f"{path} has no command {words[:1]}"
        command, path, words = command.commands[words[0]], f"{path} {words[0]}", words[1:]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    extra = command.context_settings.get("allow_interspersed_args") is False
    for word in words:
        if word == "--":
            break
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"{path} has no {word}"
        elif extra and word.endswith(".py"):
            break


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page != "README.md"))
        for page in PAGES
        if any(block.language == "python" and not block.title for block in blocks(page))
    ],
)
def test_the_python_blocks_of_a_page_run(page: str, commands: Commands) -> None:
    own = [b.text for b in blocks(page) if b.language == "python" and not b.title]
    commands.write("page.py", "\n".join([BEFORE.get(page, ""), *own]))
    done = commands.python("page.py", forks=True)
    assert done.code == 0, done.text


@pytest.mark.slow
@pytest.mark.timeout(2 * LONG)
@pytest.mark.parametrize("page", STEP_BY_STEP)
def test_a_page_works_step_by_step(page: str, commands: Commands) -> None:
    """Its files are written, then its ``sh`` lines are run in order, as a reader would."""
    for block in blocks(page):
        if block.title:
            commands.write(block.title, block.text)
        for line in block.text.splitlines() if block.language == "sh" else ():
            program, *words = shlex.split(line, comments=True)
            run = {"python": (sys.executable,), "spartito": SPARTITO}[program]
            done = commands.start(*run, *words, forks=True).end(LONG)
            assert done.code == 0, f"{line}\n{done.text}"


@pytest.mark.slow
@pytest.mark.parametrize("name", OLD)
def test_a_script_from_elsewhere_runs(name: str, commands: Commands) -> None:
    title, package = OLD[name]
    if find_spec(package) is None:
        skips.skip("dev", f"no {package} here")
    page = f"docs/guides/coming-from/{name}.md"
    (text,) = (block.text for block in blocks(page) if block.title == title)
    commands.write(title, text)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    words = torchrun if package == "torch" else ("-W", "default")  # theirs are not ours to mind
    done = commands.start(sys.executable, *words, title).end(LONG)
    assert done.code == 0, done.text
