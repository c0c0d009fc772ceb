"""Lines of figures as JSON, which has no NaN and no infinity: ``null`` stands for both."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def line_of(record: Mapping[str, Any]) -> str:
    """``record`` as one line of JSON, without its end."""
    return json.dumps(as_json(record), allow_nan=False)


def record_of(line: str) -> dict[str, Any]:
    """The record of a line, with NaN for ``null``; empty for a line that is none."""
    return {name: _known(value) for name, value in json_object(line).items()}


def json_object(text: str) -> dict[str, Any]:
    """The object that ``text`` holds; empty for anything else, such as a line cut short."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def as_json(value: Any) -> Any:
    """``value``, as it is or nested, without numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {name: as_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _known(value: Any) -> Any:
    if isinstance(value, list):
        return [_known(each) for each in value]
    return math.nan if value is None else value
