"""Slurm's short forms of lists: ``node[01-03,07],gpu5`` of nodes, ``2(x3),1`` of counts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from spartito.errors import UserError

MOST_NODES = 65_536
"""The largest list that is written out; a longer one is a typing mistake."""

_ITEM = re.compile(r"(?:[^\[\],\s]|\[[^\[\],\s]+(?:,[^\[\],\s]+)*\])+")
_PART = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand(nodelist: str) -> tuple[str, ...]:
    """The nodes of ``nodelist`` in its order; `UserError` that names a list which is none.

    ``[01-03,07]`` stands for 01, 02, 03, 07, with the zeros of the first number of a range; of
    several brackets in a name the last one runs fastest.
    """
    nodes: list[str] = []
    for item in _items(nodelist):
        parts = [
            _numbers(nodelist, bracket) if bracket else [text]
            for bracket, text in _PART.findall(item)
        ]
        size = 1
        for part in parts:
            size *= len(part)
        if len(nodes) + size > MOST_NODES:
            raise _wrong(nodelist, f"it has more than {MOST_NODES} nodes")
        nodes += map("".join, product(*parts))
    return tuple(nodes)


def expand_counts(counts: str) -> tuple[int, ...]:
    """The numbers of ``counts``: ``2(x3),1`` is 2, 2, 2, 1; `UserError` that names another text."""
    numbers: list[int] = []
    for item in counts.split(","):
        found = _COUNT.fullmatch(item.strip())
        times = int(found[2] or 1) if found else 0
        if found is None or times < 1 or len(numbers) + times > MOST_NODES:
            raise UserError(f"the tasks per node {counts!r} are not counts like 2(x3),1")
        numbers += [int(found[1])] * times
    return tuple(numbers)


def _items(nodelist: str) -> Iterator[str]:
    """What stands between the commas that are outside of brackets."""
    position = 0
    while True:
        found = _ITEM.match(nodelist, position)
        if found is None:
            raise _wrong(nodelist, f"no node's name begins at {nodelist[position:]!r}")
        yield found[0]
        position = found.end()
        if position == len(nodelist):
            return
        if nodelist[position] != ",":
            raise _wrong(nodelist, f"a comma is expected at {nodelist[position:]!r}")
        position += 1


def _numbers(nodelist: str, bracket: str) -> list[str]:
    written: list[str] = []
    for part in bracket.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise _wrong(nodelist, f"{part!r} is no number and no range")
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise _wrong(nodelist, f"the range {part} runs backwards")
        if len(written) + int(last) - int(first) >= MOST_NODES:
            raise _wrong(nodelist, f"it has more than {MOST_NODES} nodes")
        written += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return written


def _wrong(nodelist: str, rule: str) -> UserError:
    return UserError(
        f"the node list {nodelist!r} does not parse: {rule}", "It looks like node[01-03,07],gpu5"
    )
