"""The figures that a model, a loss or a callback reports by `sp.log`, as one metric."""

from __future__ import annotations

from collections.abc import Collection
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from spartito.accelerators import exact, wide
from spartito.engine.devices.host_reads import Number, added, read
from spartito.engine.losses.loss import describe
from spartito.errors import UserError
from spartito.report.figures import VALIDATION
from spartito.training.metrics.base import NAN, Metric, Value

OWN = frozenset({"loss", "epoch", "step", "seconds", "examples_per_second", "data_wait_fraction"})
"""The figures and positions that every epoch has."""

_Report = tuple[str, Number, "Number | None"]


class Logged(Metric):
    """The means of what was reported, by the names that were given.

    A report without a count is one of all rows of a batch, so it waits until `settle` says how
    many these are. Sums stay on the device until somebody reads them.

    Args:
        taken: The names of other figures.
    """

    def __init__(self, taken: Collection[str] = ()) -> None:
        self._taken = frozenset(taken) | OWN
        self._size = 1
        super().__init__("")

    def reset(self) -> None:
        self._waiting: list[_Report] = []
        self._sums: dict[str, list[Number]] = {}

    def take(self, name: str, value: Any, count: Any) -> None:
        """Remember a report, as `spartito.log` describes it."""
        if not isinstance(name, str) or not name or name in self._taken:
            raise UserError(f"sp.log({name!r}, ...)", f"Another name than {self._known}.")
        if name.startswith(VALIDATION):
            raise UserError(
                f"sp.log({name!r}, ...)",
                f"A name without {VALIDATION}: that stands before what the validation reports.",
            )
        if isinstance(value, Tensor) and not value.is_complex():
            value, rows = _mean(value.detach())
            count = rows if count is None else count
        elif not isinstance(value, Real):
            raise _no_number(name, value)
        else:
            value = float(value)
        self._waiting.append((name, value, None if count is None else _counted(name, count)))

    def update(self, output: Any, target: Any, size: int) -> None:
        self.settle(size)

    def settle(self, size: int) -> None:
        """What was reported since the last call was of so many examples."""
        self._size = size
        if self._waiting:
            self._settle()

    @property
    def has_any(self) -> bool:
        """Whether anything was reported."""
        return bool(self._sums or self._waiting)

    def forget(self) -> None:
        """The reports since the last `settle` were of rows that count for nothing."""
        self._size = 0
        self._waiting.clear()

    def compute(self) -> Value:
        """Compute the figures.

        Returns:
            A float for each name; NaN where nothing counts.
        """
        self._settle()
        numbers = iter(read([part for pair in self._sums.values() for part in pair]))
        found = {name: (next(numbers), next(numbers)) for name in self._sums}
        return {name: total / count if count else NAN for name, (total, count) in found.items()}

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        return self.settled()

    def settled(self) -> dict[str, Any]:
        """The state without what the batch that is computed now has reported so far."""
        return {name: torch.stack([_tensor(part) for part in _alike(pair)])
                for name, pair in self._sums.items()}  # fmt: skip

    def merge(self, states: Any) -> None:
        self.reset()
        for state in states:
            for name, sums in state.items():
                pair = self._sums.setdefault(name, [0.0, 0.0])
                self._sums[name] = [a + b for a, b in zip(pair, sums.tolist(), strict=True)]

    def _settle(self) -> None:
        for name, value, given in self._waiting:
            count = self._size if given is None else given
            pair = self._sums.setdefault(name, [0.0, 0.0])
            self._sums[name] = [added(pair[0], _total(value, count)), added(pair[1], count)]
        self._waiting.clear()

    @property
    def _known(self) -> str:
        return ", ".join(sorted(self._taken))


def _mean(value: Tensor) -> tuple[Tensor, int | None]:
    """The mean of a tensor, and of how many rows it is, unless it is one number.

    It is a copy: an update changes a parameter in place before anybody counts what it was.
    """
    if not value.dim():
        return value.clone(), None
    return value.mean(dtype=exact(value)), len(value)


def _counted(name: str, count: Any) -> Number:
    """Of how many a value is the mean."""
    if isinstance(count, Tensor) and count.numel() == 1 and not count.is_complex():
        return count.detach().clone().view(())
    if isinstance(count, Real) and float(count) >= 0:
        return float(count)
    raise UserError(
        f"sp.log({name!r}, ..., count={describe(count) if isinstance(count, Tensor) else count!r})",
        "Of how many the value is the mean: one number, 0 or more.",
    )


def _total(value: Number, count: Number) -> Number:
    """The sum of so many values; a mean over none is NaN, and counts for nothing."""
    if not isinstance(count, Tensor):
        if not count:
            return 0.0
        return (wide(value) if isinstance(value, Tensor) else value) * count
    value = wide(value) if isinstance(value, Tensor) else value
    return torch.where(count > 0, value * count, 0.0)


def _alike(pair: list[Number]) -> list[Number]:
    """Both on the device where one is."""
    there = next((part for part in pair if isinstance(part, Tensor)), None)
    if there is None:
        return pair
    return [part if isinstance(part, Tensor) else torch.full_like(there, part) for part in pair]


def _tensor(part: Number) -> Tensor:
    return part if isinstance(part, Tensor) else torch.tensor(part, dtype=torch.float64)


def _no_number(name: str, value: object) -> UserError:
    return UserError(
        f"sp.log({name!r}, {describe(value)}) reports no number", "Give a float, or a tensor."
    )


def refuse_uncounted(name: str, value: object, count: object) -> None:
    """As a listener on a task whose figures do not count.

    Args:
        name: As `spartito.engine.logged.log` has it.
        value: Likewise.
        count: Likewise.

    Raises:
        UserError: In any case.
    """
    raise UserError(
        f"sp.log({name!r}, ...) in a stage of a pipeline that is not the last",
        "Report it in the last layers or in the loss, which one task sees of each batch.",
    )
