"""YAML as people write it, which every reader takes for the same."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from textwrap import wrap
from typing import Any

import yaml

WIDTH = 98
"""Of a comment."""


def dump(document: Mapping[str, Any]) -> str:
    """``document`` as YAML in which a string is a string to every composer.

    PyYAML reads YAML 1.1 (docker-compose 1), Go's yaml.v3 rather YAML 1.2 (docker compose 2).
    """
    text: str = yaml.dump(
        document,
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
        width=1 << 20,
    )
    return text


def comment(text: str, indent: str = "") -> list[str]:
    """The lines of a comment; no name and no option is broken at its hyphens."""
    lines = wrap(text, WIDTH - len(indent), break_on_hyphens=False, break_long_words=False)
    return [f"{indent}# {line}" for line in lines]


def commented(
    document: Mapping[str, Any], above: Mapping[str, str], apart: Collection[str] = ()
) -> Iterator[str]:
    """The lines of ``document``, with comments.

    Args:
        document: what is written.
        above: what stands above the first line that begins so.
        apart: lines at the top that have a blank one before them begin so.
    """
    left, last = dict(above), ""
    for line in dump(document).splitlines():
        if last and line.startswith(tuple(apart)):
            yield ""
        if key := next((key for key in left if line.lstrip().startswith(key)), None):
            yield from comment(left.pop(key), " " * (len(line) - len(line.lstrip())))
        yield line
        last = line


class List(list[Any]):
    """A list on one line."""


class Row(dict[str, Any]):
    """A mapping on one line."""


class Anchored(dict[str, Any]):
    """A mapping that others refer to by ``name``."""

    def __init__(self, name: str, items: dict[str, Any]) -> None:
        super().__init__(items)
        self.name = name


class Block(str):
    """A text of several lines, written as such."""


class Mode(int):
    """The mode of a file, written as people do: 0440."""


class _Merge(str):
    """The key that merges another mapping in."""


MERGE = _Merge("<<")


class _Dumper(yaml.SafeDumper):
    """Writes YAML as people do: lists indented, anchors with names, text on one line."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Lists stand further in than their key."""
        super().increase_indent(flow, False)

    def generate_anchor(self, node: yaml.Node) -> str:
        """The name that the mapping has, if it has one, instead of a number."""
        return self._names.get(id(node)) or super().generate_anchor(node)

    @property
    def _names(self) -> dict[int, str]:
        kept = self.object_keeper
        return {
            id(self.represented_objects[id(one)]): one.name
            for one in kept
            if isinstance(one, Anchored)
        }


def _mapping(dumper: yaml.SafeDumper, data: dict[str, Any]) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", data.items(), flow_style=False)


def _row(dumper: yaml.SafeDumper, data: dict[str, Any]) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", data.items(), flow_style=True)


def _list(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)


def _merge(dumper: yaml.SafeDumper, data: _Merge) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:merge", "<<")


# What PyYAML takes for a string and yaml.v3 does not (its resolve.go), underscores left out.
_NUMBER = re.compile(
    r"""[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)(e[-+]?[0-9]+)?
    | [-+]?0(x[0-9a-f]+|o[-+]?[0-7]+|b[-+]?[01]+)""",
    re.VERBOSE | re.IGNORECASE,
)
_TIME = re.compile(
    r"""[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}
    ((t|\ +)[0-9]{1,2}:[0-9]{1,2}:[0-9]{1,2}([.,][0-9]+)?(z|[-+][0-9]{2}:[0-9]{2})?)?""",
    re.VERBOSE | re.IGNORECASE,
)
_LINE_BREAK = re.compile("[\n\x85\u2028\u2029]")
_DOUBLED = re.compile(r"""[^"\\]*'[^"\\]*""")
"""In single quotes it would have some of them twice, in double ones nothing is changed."""
_SPECIAL = re.compile(r"[][{},:#&*!|>%@`]")


def _string(dumper: yaml.SafeDumper, data: str) -> yaml.Node:
    style = None  # quotes only where PyYAML itself needs them
    if _LINE_BREAK.search(data) or (_DOUBLED.fullmatch(data) and _SPECIAL.search(data)):
        style = '"'
    elif _NUMBER.fullmatch(data[:1] + data[1:].replace("_", "")) or _TIME.fullmatch(data):
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style)


def _block(dumper: yaml.SafeDumper, data: Block) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(data), style="|")


def _mode(dumper: yaml.SafeDumper, data: Mode) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:int", f"0{data:o}")


_Dumper.add_representer(str, _string)
_Dumper.add_representer(Mode, _mode)
_Dumper.add_representer(Block, _block)
_Dumper.add_representer(Anchored, _mapping)
_Dumper.add_representer(Row, _row)
_Dumper.add_representer(List, _list)
_Dumper.add_representer(_Merge, _merge)
