"""Strategies with options, as ``--strategies`` says them: ``local_sgd:every=50:compress=4bit``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spartito.errors import UserError
from spartito.names import nearest
from spartito.registry import simplest_first, title_of

ALL = "all"
_OPTION = re.compile(r":(?=[a-z_]+=)")
"""Between options; a value may have a colon of its own, as topk:0.01."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A strategy and its options."""

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """As a table says it: ``local_sgd every=50 compress=4bit``."""
        return title_of(self.strategy, self.options)


def read_variants(text: str, known: Sequence[str]) -> list[Variant]:
    """The strategies that ``--strategies`` names.

    Args:
        text: ``all``, or some with commas, each with its options behind colons.
        known: the strategies there are.

    Returns:
        Each once; all from the simplest on.

    Raises:
        UserError: none, an unknown one, or an option without a value.
    """
    if text == ALL:
        return [Variant(name) for name in sorted(known, key=simplest_first)]
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UserError(f"--strategies {text!r} names none", nearest("", [ALL, *known]))
    found = [_read(part, known) for part in parts]
    return [one for number, one in enumerate(found) if one not in found[:number]]


def _read(text: str, known: Sequence[str]) -> Variant:
    name, *options = _OPTION.split(text)
    if name.partition(":")[0] in known and ":" in name:
        raise UserError(
            f"--strategies {text!r}: {name.partition(':')[2]!r} is not an option and its value",
            "Write it as local_sgd:every=50:compress=4bit.",
        )
    if name not in known:
        raise UserError(f"{name!r} is not a strategy", nearest(name, [ALL, *known]))
    pairs = [option.partition("=")[::2] for option in options]
    return Variant(name, {key: _value(value) for key, value in pairs})


def _value(text: str) -> Any:
    """A number, true, false or null as JSON has them; all else is a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text
