"""Is a loss a mean that may be computed in parts? Two halves of a batch tell, and its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from operator import is_
from sys import intern
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from spartito.accelerators import generator_states, set_generator_states
from spartito.data.batch import Batch
from spartito.engine.logged import listening
from spartito.engine.losses.loss import LossFunction, WeightedLoss, look, mapped, of_torch
from spartito.engine.losses.loss_means import ADVICE, COMPARES, SEVERAL, all_equal
from spartito.errors import UserError
from spartito.notes import warn

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""By how much of the loss the sum of the halves may differ from the whole: rounding."""
_LOW_PRECISION = 2e-2

_ALWAYS, _SELDOM = 8, 61
"""Numbers on a device are compared so often at first, then each so many losses: one waits.

A prime: however many losses a step has, each comes up in its turn.
"""

_MOST = 4
"""Losses that a training remembers: those that its steps take in turn."""


@dataclass(slots=True)
class _Known:
    """What has been found out about one loss.

    Attributes:
        makers: Which one it is.
        left: The halves of so many batches are still compared.
        agreed: Whether the halves of one made the loss of the whole.
        numbers: How often it had numbers on a device.
    """

    makers: list[object]
    left: int = 3
    agreed: bool = False
    numbers: int = 0

    def compare_numbers(self, found: WeightedLoss) -> WeightedLoss:
        """``found`` with a doubt if the numbers of its means differ; not all are looked at."""
        self.numbers += 1
        if self.numbers > _ALWAYS and self.numbers % _SELDOM:
            return found
        if all_equal(found.apart):
            return found
        return structs.replace(found, doubt=SEVERAL, is_guess=False)


class Comparisons:
    """What is known of a training's losses, and what was said of them.

    Of each loss by itself: nothing that another has told is about it.
    """

    def __init__(self) -> None:
        self._known: list[_Known] = []
        self._said: set[str] = set()

    def look(
        self, loss: LossFunction | None, output: Any, batch: Batch, found: WeightedLoss
    ) -> WeightedLoss:
        """``found`` with the doubt that halves of the batch raise, or without one that they end.

        Args:
            loss: The user's function, of which any part can be asked; None: nobody knows it.
            output: The model's, for the rows of ``batch``.
            batch: At least two rows, else there is nothing to compare.
            found: The loss of the whole.
        """
        if found.apart:
            found = self._of(loss).compare_numbers(found)
        if loss is None or of_torch(loss):
            return found
        known = self._of(loss)
        if known.left and (found.is_guess or not found.doubt):
            known.left -= 1
            agree = compare_halves(loss, output, batch, found)
            if agree is False:
                doubt = found.doubt or COMPARES
                return structs.replace(found, doubt=doubt, is_guess=False)
            known.agreed = known.agreed or agree is True
        if found.is_guess and known.agreed:
            return structs.replace(found, doubt="", is_guess=False)
        return found

    def tell(self, what: str, deterministic: bool) -> None:
        """Refuse a loss whose parts make no exact mean, or warn of it once in this training.

        Args:
            what: `WeightedLoss.doubt` of what `look` returned.
            deterministic: Whether the training is to equal that of one device.

        Raises:
            UserError: It is deterministic.
        """
        if deterministic:
            raise UserError(
                f"{what}: each replica computes it of its own part of the batch", ADVICE
            )
        if what not in self._said:
            self._said.add(what)
            warn(
                "%s: each replica computes it of its own part of the batch, so the numbers depend "
                "on how many replicas there are. %s",
                what, ADVICE,
            )  # fmt: skip

    def _of(self, loss: LossFunction | None) -> _Known:
        """What is known of ``loss``."""
        makers = makers_of(loss)
        for known in self._known:
            if len(known.makers) == len(makers) and all(map(is_, known.makers, makers)):
                return known
        known = _Known(makers)
        self._known = [known, *self._known[: _MOST - 1]]
        return known


def makers_of(loss: Any) -> list[object]:
    """What tells one loss from another, also where each step makes a function of its own of it.

    So that is the code of a function, with the functions and names that it was given; not numbers
    and tensors, which may be a step's own.
    """
    kind = type(loss)
    if kind is MethodType:
        return [loss.__self__, loss.__func__]
    if kind is partial:
        return _and_given(makers_of(loss.func), (*loss.args, *loss.keywords.values()))
    if kind is not FunctionType:
        return [loss]
    makers: list[object] = [loss.__code__]
    if loss.__closure__ is not None:
        with suppress(ValueError):  # one is empty, and so no part of what was computed
            _and_given(makers, [cell.cell_contents for cell in loss.__closure__])
    if loss.__defaults__ is not None:
        _and_given(makers, loss.__defaults__)
    if loss.__kwdefaults__ is not None:
        _and_given(makers, loss.__kwdefaults__.values())
    return makers


def _and_given(makers: list[object], given: Iterable[object]) -> list[object]:
    for each in given:
        if callable(each) or each is True or each is False:
            makers.append(each)
        elif type(each) is str:
            makers.append(intern(each))
    return makers


def compare_halves(
    loss: LossFunction, output: Any, batch: Batch, found: WeightedLoss
) -> bool | None:
    """Whether two halves of a batch make the loss of the whole.

    Returns:
        None where the loss cannot be compared: it draws at random, or takes no part of a batch.
    """
    size, middle = batch.size, batch.size // 2
    if not middle or not found.counts:
        return None
    device = found.value.device
    states = generator_states(device)
    try:
        with listening(None):
            parts = [
                _part(_copied(loss), output, batch, begin, end)
                for begin, end in ((0, size), (0, middle), (middle, size))
            ]
    except UserError:
        raise
    except Exception:
        return None  # what a user's function says of a part is not about the whole
    finally:
        set_generator_states(device, states)
    again, *halves = parts
    tolerance = _TOLERANCE.get(found.value.dtype, _LOW_PRECISION)
    if not _make(found, [again], tolerance):
        return None  # it draws at random, or counts its calls
    return _make(found, halves, tolerance)


def _make(whole: WeightedLoss, parts: list[WeightedLoss], tolerance: float) -> bool:
    """Whether the sums and the weights of ``parts`` add up to those of ``whole``."""
    pairs = [
        (float(whole.total), [float(part.total) for part in parts]),
        (float(whole.weight), [float(part.weight) for part in parts]),
    ]
    return all(abs(one - sum(all_)) <= tolerance * sum(map(abs, all_)) for one, all_ in pairs)


def _copied(loss: Any) -> Any:
    """``loss`` with counters and other state of its own, so that to ask it changes nothing."""
    if isinstance(loss, partial):
        return partial(_copied(loss.func), *deepcopy(loss.args), **deepcopy(loss.keywords))
    if not isinstance(loss, FunctionType):
        return deepcopy(loss)
    known = loss.__globals__
    state = {name: known[name] for name in loss.__code__.co_names if name in known}
    own = {name: deepcopy(value) for name, value in state.items() if type(value) in _CONTAINERS}
    cells = tuple(CellType(_copied(cell.cell_contents)) for cell in loss.__closure__ or ())
    copied = FunctionType(
        loss.__code__, {**known, **own}, loss.__name__, deepcopy(loss.__defaults__), cells
    )
    copied.__kwdefaults__ = deepcopy(loss.__kwdefaults__)
    return copied


_CONTAINERS = (dict, list, set)
"""Where a module keeps what its functions change, besides names that they bind anew."""


def _part(loss: LossFunction, output: Any, batch: Batch, begin: int, end: int) -> WeightedLoss:
    """The loss of some rows of a batch."""
    size = batch.size

    def cut(tensor: Tensor) -> Tensor:
        of_rows = tensor.dim() and tensor.shape[0] == size
        return tensor[begin:end] if of_rows else tensor

    part = structs.replace(
        batch, data=mapped(batch.data, cut), size=end - begin, offsets=batch.offsets[begin:end]
    )
    return look(loss, mapped(_detached(output), cut), part)


def _detached(output: Any) -> Any:
    detach: Callable[[Tensor], Tensor] = Tensor.detach
    return mapped(output, detach)
