"""``docs/explanation/zoo.md``: written from cells, and read again to be held against them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.zoo.cells import ALONE, NESTED, Cell, rows
from tests.zoo.models import TITLES

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "zoo.md"

RESULTS = """\
# The zoo

Real architectures, tiny, with random weights, in fp64: five steps of `fit` with \
`deterministic=True`, clipping and a last batch that is smaller, beside a plain loop of torch. \
They have padded texts, labels that are left out, frozen layers and BatchNorm. A number is the \
largest difference of any weight, any buffer, any step's loss and the loss over all examples in \
the end, rounded up; 1e-10 is the most that counts as right. "refused" means that the strategy \
says before or in the first step that it cannot give these numbers; the notes below have its \
words.

{summary}

{alone}

## Strategies that nest

{nested}

## What is refused

{refused}
"""

METHOD = """\

## How it is measured

`python -m tests.zoo --write docs/explanation/zoo.md` trains all of it in real processes and \
writes this page; the slow tests hold each cell against what runs. `mirrored` and `sharded 3` \
have three replicas, of which the last batch leaves one without rows; `mesh 2x2` has four tasks, \
the others two; `pipeline` has two microbatches. Under `local_sgd` two groups meet after every \
second update, and plain torch trains two models in the same way. `parameter_server` has \
`max_staleness=0`; there, and under `local_sgd`, the losses of single steps are not compared. \
Strategies that nest have four tasks: two data shards of two tasks each, or two groups of two; \
over servers there is a chief of its own. Where a number is larger than 1e-10, plain torch is \
asked how far it goes itself when each weight begins at the next larger number: ten times that is \
right too. BatchNorm over three small pictures makes 1e-9 of 1e-16. \
Transformers computes some norms and losses in fp32; here they stay in fp64.
"""


def text_of(table: Mapping[tuple[str, str], Cell]) -> str:
    """The page for these cells, which must be all."""
    notes: list[str] = []
    right = sum(cell.right for cell in table.values())
    refused = sum(bool(cell.refused) for cell in table.values())
    summary = (
        f"Of {len(table)} cells {right} are right ({right / len(table):.0%}) and {refused} are "
        "refused by name."
    )
    tables = [_table(columns, table, notes) for columns in (ALONE, NESTED)]
    listed = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    alone, nested = tables
    return (
        RESULTS.format(summary=summary, alone=alone, nested=nested, refused="\n".join(listed))
        + METHOD
    )


def _table(columns: Iterable[str], table: Mapping[tuple[str, str], Cell], notes: list[str]) -> str:
    """The cells of some columns; what is refused is added to ``notes``."""
    names = list(columns)
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for name in rows():
        shown = [_shown(table[name, column], notes) for column in names]
        lines.append(f"| {TITLES[name]} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def read(page: Path = PAGE) -> dict[tuple[str, str], str]:
    """What the page says of each cell: "right", or the words of its refusal."""
    text = page.read_text()
    notes = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    names = {TITLES[name]: name for name in rows()}
    found, columns = {}, list[str]()
    for line in text.splitlines():
        if not line.startswith("|"):
            continue
        title, *cells = (part.strip() for part in line[1:-1].split("|"))
        if not title:
            columns = cells
        elif title in names:
            for column, said in zip(columns, cells, strict=True):
                number = said.removeprefix("refused ").strip("()")
                found[names[title], column] = (
                    notes[number] if said.startswith("refused") else _kind(said)
                )
    return found


def said_of(cell: Cell) -> str:
    """What `read` returns for a page that was written from ``cell``."""
    return _one_line(cell.refused) if cell.refused else "right" if cell.right else "wrong"


def without_numbers(said: str) -> str:
    """What is said without its numbers: those of whichever replica was the first to refuse.

    Args:
        said: As `said_of` and `read` return it.
    """
    return re.sub(r"\d+", "n", said)


def _shown(cell: Cell, notes: list[str]) -> str:
    if not cell.refused:
        return f"{_rounded(cell.difference)}" if cell.right else "**wrong**"
    note = _one_line(cell.refused)
    alike = [without_numbers(each) for each in notes]
    if without_numbers(note) not in alike:
        notes.append(note)
        alike.append(without_numbers(note))
    return f"refused ({alike.index(without_numbers(note)) + 1})"


def _rounded(value: float) -> str:
    """The next power of ten: the last digits are those of one machine."""
    return f"1e{math.ceil(math.log10(max(value, 1e-16)))}"


def _kind(said: str) -> str:
    return "right" if re.fullmatch(r"1e-\d+", said) else "wrong"


def _one_line(text: str) -> str:
    """An error in one line of a page, without what would be a mark there."""
    told = " ".join(re.sub(r"(?<=[^.:;,\s])\n", ". ", text).split())
    return re.sub(r"([<>_*|])", r"\\\1", told)
