"""How the figures of an epoch are called, compared and written out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

BOOKKEEPING = (
    "epoch", "step", "seconds", "examples_per_second", "data_wait_fraction",
    "meetings", "drift", "bytes_between_groups",
    "merges", "merged_alone", "staleness", "rejected", "redone",
    "meetings_of_sites", "drift_of_sites", "bytes_between_sites",
    "meeting_wait_fraction", "meeting_exchange_fraction",
)  # fmt: skip
"""Keys of an epoch's logs that say how it ran, not how well the model did."""

GROUP_LOSS = "loss_of_group_"
"""Before the number of a group of replicas."""

OF_GROUPS = (GROUP_LOSS, "merges_of_group_")
"""All that is."""

VALIDATION = "val_"
NOTHING = "–"

_FRACTIONS = re.compile(r"(^|_)(acc|accuracy|precision|recall|fraction)($|_)")
_HIGHER = re.compile(
    r"(^|_)(acc|accuracy|auc|auroc|average_precision|precision|recall|f1|fmeasure|score|r2)($|_)"
)


def higher_is_better(name: str) -> bool:
    """Whether more of the figure ``name`` is better: accuracies and their like, not losses."""
    return bool(_HIGHER.search(name)) and "loss" not in name and "error" not in name


def scalars(logs: Mapping[str, Any]) -> dict[str, Any]:
    """``logs`` without figures that are lists: a confusion matrix, one value per class."""
    return {name: value for name, value in logs.items() if not isinstance(value, list | dict)}


def metric_names(logs: Iterable[str]) -> list[str]:
    """The names in ``logs`` that say how well the model did, without ``val_``, loss first."""
    quality = (n for n in logs if n not in BOOKKEEPING and not n.startswith(OF_GROUPS))
    names = dict.fromkeys(name.removeprefix(VALIDATION) for name in quality)
    return sorted(names, key=lambda name: name != "loss")


def is_fraction(name: str) -> bool:
    """Whether the figure ``name`` is a part of one, which is read in percent."""
    return bool(_FRACTIONS.search(name))


def figure(name: str, value: float | None) -> str:
    """``value`` as a person reads it: accuracies and fractions in percent, the rest in 4 digits."""
    if value is None or math.isnan(value):
        return NOTHING if value is None else "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if is_fraction(name):
        return f"{value:.1%}" if name.endswith("_wait_fraction") else f"{value:.2%}"
    if name in ("epoch", "step", "redone"):
        return f"{value:,.0f}"
    if name == "examples_per_second":
        return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    if name == "seconds":
        return clock_time(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3e}"
    return f"{value:.4f}"


def clock_time(seconds: float) -> str:
    """Seconds as ``12.3 s`` below a minute, then ``3:05``, then ``1:03:05``."""
    if not math.isfinite(seconds):
        return NOTHING
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def percent(fraction: float) -> str:
    """A fraction as ``12.3%``."""
    return f"{fraction:.1%}"


def points(name: str, value: float) -> str:
    """A difference of the figure ``name``: of fractions in points of a percent, else as it is."""
    return f"{100 * value:.2f} points" if is_fraction(name) else f"{value:.2g}"


def or_nothing(value: float | None, write: Callable[[float], str]) -> str:
    """``value`` as ``write`` says it, a dash where there is none."""
    return NOTHING if value is None else write(value)


def label(name: str) -> str:
    """``val_binary_accuracy`` as words: ``validation binary accuracy``."""
    words = name.removeprefix(VALIDATION).replace("_", " ")
    return f"validation {words}" if name.startswith(VALIDATION) else words


def number(value: Any) -> float | None:
    """``value`` as a float, None for what is no number."""
    return float(value) if isinstance(value, int | float) else None


def finite(values: Iterable[Any]) -> list[float]:
    """Those of ``values`` that are finite numbers."""
    numbers = map(number, values)
    return [value for value in numbers if value is not None and math.isfinite(value)]
