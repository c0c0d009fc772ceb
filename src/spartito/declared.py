"""The text form of a strategy: ``local_sgd(every=20, inside=sharded(zero=2))``.

    text -- parse --> Declared -- str --> the same text

It is the same on the command line, in the environment, in the files of every launcher, in reports
and in checkpoints. It has literals of Python and is never evaluated. Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import PurePath
from reprlib import repr as _short
from typing import Any

from spartito.errors import UserError
from spartito.names import ENV_STRATEGY, ENV_STRATEGY_OPTIONS, nearest
from spartito.registry import (
    OF_THE_JOB,
    StrategyInfo,
    nesting_names,
    other_option,
    strategy_info,
    strategy_names,
)

INSIDE = "inside"
"""The option that is another strategy."""

LONGEST = 1 << 14
"""Characters that a text may have, ..."""
DEEPEST = 20
"""... and how deep strategies, lists and dictionaries in it may lie in each other."""
LONGEST_NUMBER = 100
LONGEST_SLUG = 100
SHOWN = 76
"""Characters of a text that an error shows."""

_SIMPLE = re.compile(r"""(?:[\w.(),= ]|"(?![0-9.e_]*"|True"|False"|None")[\w.:]+")*""", re.ASCII)
"""Texts that differ also without their punctuation."""
_SPACE = re.compile(r"\s*")
_STRATEGY = re.compile(r"[A-Za-z_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_OPTION = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BARE = re.compile(r"[A-Za-z0-9_.:+-]+")
_KEY = re.compile(r"[A-Za-z0-9_.+-]+")
_NONE = re.compile(r"None\b")
_INTEGER = re.compile(r"[+-]?(?:0|[1-9][0-9_]*)")
_FLOAT = re.compile(
    r"[+-]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][+-]?[0-9]+)?|[0-9_]+[eE][+-]?[0-9]+)"
)
_NUMBER_LIKE = re.compile(r"[+-]?[0-9._]*[0-9][0-9._]*(?:[eE][+-]?[0-9]+)?")
_STRING = re.compile(r""""((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'""", re.DOTALL)
_ESCAPE = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<one>.))",
    re.DOTALL,
)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_WORDS = {"True": True, "False": False, "None": None}
_MEANT = {"true": "True", "false": "False", "none": "None", "null": "None"}
_ITEMS_END = {"[": "]", "(": ")"}


@dataclass(frozen=True, slots=True, eq=False)
class Declared:
    """A strategy as it is asked for: its name, and what is said of its options.

    Options are literals (numbers, strings, booleans, None, and lists, tuples and dictionaries of
    them); ``inside`` is another strategy. Two are equal if they are written alike: True is not 1,
    and the axes of a mesh have an order.

    Args:
        name: what people call the strategy.
        options: keyword arguments of its class. A string as ``inside`` is read as a strategy.

    Raises:
        UserError: an option cannot be written.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check and copy the options; the same ones are always in the same order."""
        if not _STRATEGY.fullmatch(self.name) or self.name in _WORDS:
            raise UserError(
                f"{self.name!r} cannot name a strategy", "Use letters, digits, ., - and _."
            )
        for name in self.options:
            if not _OPTION.fullmatch(name):
                raise UserError(f"{name!r} cannot name an option", "Use letters, digits and _.")
        given = {name: _literal(name, self.options[name]) for name in sorted(self.options)}
        if INSIDE in given:
            inside = given.pop(INSIDE)
            given[INSIDE] = parse(inside, checked=False) if isinstance(inside, str) else inside
            if not isinstance(given[INSIDE], Declared | None):
                raise UserError(f"inside={inside!r} is not a strategy", "As inside=mirrored.")
        object.__setattr__(self, "options", given)
        if _depth(self) > DEEPEST or len(str(self)) > LONGEST:
            raise UserError(
                f"{_cut(str(self), 0)[0]} is longer or deeper than a strategy can be written",
                f"It has {LONGEST} characters at most, and {DEEPEST} levels.",
            )

    def __str__(self) -> str:
        """The text, which `parse` reads as an equal one; that of a strategy alone is its name."""
        said = ", ".join(f"{name}={_written(value)}" for name, value in self.options.items())
        return f"{self.name}({said})" if said else self.name

    def __eq__(self, other: object) -> bool:
        """Whether both are written alike."""
        return isinstance(other, Declared) and str(self) == str(other)

    def __hash__(self) -> int:
        """That of the text."""
        return hash(str(self))

    @property
    def slug(self) -> str:
        """A name for files, no two alike: letters, digits, ``.``, ``_`` and ``-``."""
        text = str(self)
        name = re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-")
        if _SIMPLE.fullmatch(text) and len(name) <= LONGEST_SLUG:
            return name
        return f"{name[:LONGEST_SLUG]}-{sha256(text.encode()).hexdigest()[:8]}"

    @property
    def inside(self) -> Declared | None:
        """The strategy that this one holds, if any is said."""
        return self.options.get(INSIDE)

    def with_options(self, options: Mapping[str, Any], source: str = "") -> Declared:
        """This strategy with further options.

        Args:
            options: they replace those of the same name.
            source: what an error says of where they come from.

        Returns:
            The strategy, checked.

        Raises:
            UserError: one is unknown, or cannot be written.
        """
        return parse(str(Declared(self.name, {**self.options, **options})), source)


def parse(text: str, source: str = "", *, checked: bool = True) -> Declared:
    """Read the text form of a strategy.

    Args:
        text: as ``mirrored`` or ``local_sgd(every=20, inside=mirrored)``.
        source: what an error says of where the text comes from, as ``--strategy``.
        checked: whether names of strategies and options must be known.

    Returns:
        The strategy.

    Raises:
        UserError: it is none; the error points at the character.
    """
    reader = _Reader(text, source, checked)
    found = reader.strategy()
    if reader.peek():
        raise reader.error(f"{reader.peek()!r} after the strategy", "One strategy ends here.")
    return found


def parse_all(text: str, source: str = "") -> list[Declared]:
    """Read several strategies with commas between them.

    Args:
        text: as ``mirrored, local_sgd(every=20)``.
        source: what an error says of where the text comes from.

    Returns:
        Each once, in this order.

    Raises:
        UserError: there is none, or one is no strategy.
    """
    reader = _Reader(text, source)
    found: dict[Declared, None] = {}
    while reader.peek():
        found[reader.strategy()] = None
        if not reader.takes(",") and reader.peek():
            raise reader.error(
                f"{reader.peek()!r} after a strategy", "Write a comma between strategies."
            )
    if not found:
        raise UserError(
            f"{source} {text!r} names no strategy".lstrip(), nearest("", strategy_names())
        )
    return list(found)


def json_options(text: str | None, source: str) -> dict[str, Any]:
    """The options of a strategy that are written as JSON.

    Args:
        text: an object of keyword arguments; None or "" for none.
        source: what an error says of where it comes from, as ``--strategy-options``.

    Returns:
        The options by name.

    Raises:
        UserError: it is no JSON object.
    """
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{source} {text!r} is not JSON: {error}", 'Give keyword arguments: {"timeout": 60}.'
        ) from error
    if not isinstance(found, dict):
        raise UserError(
            f"{source} {text!r} is not a JSON object", 'Give keyword arguments: {"timeout": 60}.'
        )
    return found


def declared_by(env: Mapping[str, str], default: str) -> Declared:
    """The strategy that an environment asks for.

    Args:
        env: its ``SPARTITO_STRATEGY`` has the text, and ``SPARTITO_STRATEGY_OPTIONS`` further
            options as JSON, which win.
        default: the strategy where none is named.

    Returns:
        The strategy, checked.

    Raises:
        UserError: it is none, or has no such options.
    """
    found = parse(env.get(ENV_STRATEGY) or default, ENV_STRATEGY)
    options = json_options(env.get(ENV_STRATEGY_OPTIONS), ENV_STRATEGY_OPTIONS)
    return found.with_options(options, "strategy options") if options else found


def described(name: str, options: Mapping[str, Any]) -> Declared:
    """A strategy that was built in Python, as far as a text can say it.

    Args:
        name: its name.
        options: the arguments it was built with. What is no literal goes by its name.

    Returns:
        The strategy, for people to read.
    """
    said = {}
    for option, value in options.items():
        try:
            said[option] = Declared(name, {option: value}).options[option]
        except UserError:
            said[option] = _name_of(value)
    return Declared(name, said)


def _name_of(value: object) -> Any:
    found = getattr(value, "declared", None)  # a strategy
    if isinstance(found, Declared):
        return found
    named = getattr(value, "__qualname__", None)
    is_plain = isinstance(value, PurePath) or type(value).__name__ == "device"
    return str(named or (value if is_plain else type(value).__name__))


def _literal(option: str, value: Any, depth: int = 1) -> Any:
    """A copy of ``value``; `UserError` unless it can be written and read again."""
    kind = type(value)
    if kind in (list, tuple) and depth <= DEEPEST:
        return kind([_literal(option, one, depth + 1) for one in value])
    if kind is dict and depth <= DEEPEST and tuple not in map(type, value):
        return {_literal("", key): _literal(option, one, depth + 1) for key, one in value.items()}
    if kind is float and math.isfinite(value):
        return value
    if kind is int and value.bit_length() < 3 * LONGEST_NUMBER:
        return value
    if value is None or kind in (bool, str) or (kind is Declared and option == INSIDE):
        return value
    raise UserError(
        f"{option}={_short(value)} cannot be written as a literal",
        "Use numbers, strings, True, False, None, and lists and dictionaries of them.",
    )


def _depth(value: Any) -> int:
    """How deep ``value`` is: 0 for what holds nothing."""
    if isinstance(value, Declared):
        value = value.options
    held = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, held), default=-1) if isinstance(value, dict | list | tuple) else 0


def _written(value: Any) -> str:
    if isinstance(value, str):
        return f'"{"".join(map(_character, value))}"'
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_written(k)}: {_written(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_written, value))}{',' * (len(value) == 1)})"
    return str(value)


def _character(one: str) -> str:
    if one == '"':
        return '\\"'
    plain = one.isprintable() and one != "\\"
    return one if plain else one.encode("unicode_escape").decode()


def _cut(text: str, at: int) -> tuple[str, int]:
    """One line of at most `SHOWN` characters around ``at``, and where that stands in it."""
    begin = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at) if "\n" in text[at:] else len(text)
    first = max(begin, min(at - SHOWN // 2, end - SHOWN))
    last = min(end, first + SHOWN)
    before, after = "..." * (first > begin), "..." * (last < end)
    shown = "".join(one if one.isprintable() else "?" for one in text[first:last])
    return f"{before}{shown}{after}", len(before) + at - first


class _Reader:
    """Reads strategies from a text, from left to right; never goes back more than a word."""

    def __init__(self, text: str, source: str = "", checked: bool = True) -> None:
        self._text, self._source, self._checked = text, source, checked
        self._at = 0
        if len(text) > LONGEST:
            self._at = LONGEST
            raise self.error(f"a strategy of {len(text)} characters", f"It has {LONGEST} at most.")

    def error(self, what: str, do: str, at: int | None = None) -> UserError:
        """One that points at a character, by default the next one."""
        shown, column = _cut(self._text, self._at if at is None else at)
        text = self._text.strip()
        if text and not _STRATEGY.fullmatch(text):  # else there is nothing to point into
            what = f"{what}\n  {shown}\n  {' ' * column}^"
        return UserError(f"{self._source}: {what}" if self._source else what, do)

    def peek(self) -> str:
        """The next character that is no space; "" at the end."""
        found = _SPACE.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return self._text[self._at : self._at + 1]

    def takes(self, character: str) -> bool:
        """Go on behind ``character`` if that is the next one."""
        is_next = self.peek() == character
        self._at += is_next
        return is_next

    def strategy(self, depth: int = 0, outer: StrategyInfo | None = None) -> Declared:
        """A name, and options in parentheses if it has any."""
        self.peek()
        begin, name = self._at, self._take(_STRATEGY)
        if name is None:
            raise self._expected("the name of a strategy", f"As {', '.join(strategy_names()[:3])}.")
        info = self._info(name, begin, outer) if self._checked else None
        options: dict[str, Any] = {}
        if self.takes("("):
            self._deeper(depth)
            self._options(name, info, options, depth, outer is not None)
        elif self.peek() in (":", "=", "[", "{"):
            raise self.error(
                f"{self.peek()!r} after {name}", f"Options stand in parentheses: {name}(...)"
            )
        try:
            return Declared(name, options)
        except UserError as error:
            raise self.error(str(error), "", begin) from error

    def _info(self, name: str, at: int, outer: StrategyInfo | None) -> StrategyInfo:
        known = strategy_names()
        if outer is not None and outer.options is not None and name not in known:
            do = nearest(name, nesting_names())
            raise self.error(f"{name!r} is not a strategy: inside={name}", do, at)
        if name not in known:
            raise self.error(f"{name!r} is not a strategy", nearest(name, known), at)
        info = strategy_info(name)
        if outer is not None and (not info.nests or name in outer.cannot_hold):
            what = f"{outer.name} cannot hold {name}: inside={name}"
            raise self.error(what, outer.do_hold(name), at)
        return info

    def _options(
        self,
        strategy: str,
        info: StrategyInfo | None,
        found: dict[str, Any],
        depth: int,
        is_inside: bool,
    ) -> None:
        known = None if info is None else info.options
        if is_inside and known is not None:
            known = tuple(option for option in known if option not in OF_THE_JOB)
        example = f"Options have names, as {strategy}({(known or ('every',))[0]}=...)."
        while not self.takes(")"):
            at, name = self._at, self._take(_OPTION)
            if name is None:
                raise self._expected("the name of an option, or )", example)
            if is_inside and self._checked and name in OF_THE_JOB:
                do = "Say it of the outermost strategy."
                raise self.error(f"{name} is an option of the whole job", do, at)
            if known is not None and name not in known:
                do = other_option(strategy, name, known) if known else "It has none here."
                raise self.error(f"{strategy} has no option {name!r}", do, at)
            if name in found:
                raise self.error(f"{name} is said twice", "Say it once.", at)
            if not self.takes("="):
                raise self._expected(f"= after {name}", example)
            found[name] = self._held(depth + 1, info) if name == INSIDE else self._value(depth + 1)
            if not self.takes(",") and self.peek() != ")":
                raise self._expected(f", or ) after {name}", "Options have commas between them.")

    def _held(self, depth: int, outer: StrategyInfo | None) -> Declared | None:
        """What stands for ``inside``."""
        if self.peek() in ("'", '"'):
            return parse(self._string(), self._source, checked=self._checked)
        if found := _NONE.match(self._text, self._at):
            self._at = found.end()
            return None
        self._deeper(depth)
        return self.strategy(depth, outer)

    def _value(self, depth: int) -> Any:
        self._deeper(depth)
        begin = self.peek()
        if begin in ("'", '"'):
            return self._string()
        if begin in _ITEMS_END:
            return self._items(depth)
        if begin == "{":
            return self._dictionary(depth)
        return self._bare()

    def _items(self, depth: int) -> Any:
        opened = self._text[self._at]
        end, found, commas = _ITEMS_END[opened], [], 0
        self._at += 1
        while not self.takes(end):
            found.append(self._value(depth + 1))
            if self.takes(","):
                commas += 1
            elif self.peek() != end:
                raise self._expected(f", or {end}", "Items have commas between them.")
        if opened == "[":
            return found
        return tuple(found) if commas or not found else found[0]

    def _dictionary(self, depth: int) -> dict[Any, Any]:
        self._at += 1
        found: dict[Any, Any] = {}
        while not self.takes("}"):
            at = self._at
            key = self._string() if self.peek() in ("'", '"') else self._bare(_KEY)
            if key in found:
                raise self.error(f"{key!r} is said twice", "Say it once.", at)
            if not self.takes(":"):
                raise self._expected(f": after {key!r}", 'As {"data": 2, "model": 2}.')
            found[key] = self._value(depth + 1)
            if not self.takes(",") and self.peek() != "}":
                raise self._expected(", or }", "Items have commas between them.")
        return found

    def _bare(self, pattern: re.Pattern[str] = _BARE) -> Any:
        """A number, or True, False or None."""
        at, word = self._at, self._bare_word(pattern)
        if word in _WORDS:
            return _WORDS[word]
        try:
            if _INTEGER.fullmatch(word):
                return int(word)
            if _FLOAT.fullmatch(word) and math.isfinite(number := float(word)):
                return number
        except ValueError:  # underscores where none can be
            pass
        if _NUMBER_LIKE.fullmatch(word):
            raise self.error(f"{word} is no number", "As 20, 0.5 or 1e-3.", at)
        if word.lower() in _MEANT:
            raise self.error(f"{word} is no literal", f"Write {_MEANT[word.lower()]}.", at)
        do = f'Write "{word}", and the whole text in single quotes for the shell.'
        raise self.error(f"{word} has no quotes", do, at)

    def _bare_word(self, pattern: re.Pattern[str]) -> str:
        word = self._take(pattern)
        if word is None:
            raise self._expected(
                "a value", 'As 20, 0.5, "4bit", True, None, [1, 2] or {"data": 2}.'
            )
        if len(word) > LONGEST_NUMBER:
            raise self.error(
                f"{word[:20]}... has {len(word)} characters", f"At most {LONGEST_NUMBER}."
            )
        return word

    def _string(self) -> str:
        found = _STRING.match(self._text, self._at)
        if found is None:
            raise self.error(
                "the quote is not closed", f"Add {self._text[self._at]} where it ends."
            )
        begin = self._at + 1

        def plain(escape: re.Match[str]) -> str:
            code = escape["x"] or escape["u"] or escape["U"]
            if code is not None and int(code, 16) < 0x110000:
                return chr(int(code, 16))
            if escape["one"] not in _ESCAPED:
                raise self.error(
                    f"{escape[0]} stands for no character",
                    r"Write \\ for a backslash.",
                    begin + escape.start(),
                )
            return _ESCAPED[escape["one"]]

        self._at = found.end()
        return _ESCAPE.sub(plain, found[1] if found[1] is not None else found[2])

    def _take(self, pattern: re.Pattern[str]) -> str | None:
        self.peek()
        found = pattern.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        return found[0]

    def _deeper(self, depth: int) -> None:
        if depth > DEEPEST:
            raise self.error(
                "this lies too deep", f"At most {DEEPEST} levels can lie in each other."
            )

    def _expected(self, what: str, do: str) -> UserError:
        there = repr(self.peek()) if self.peek() else "the end"
        if not self.peek() and self._text.strip():
            do = "It is not complete."
        return self.error(f"expected {what}, not {there}", do)
