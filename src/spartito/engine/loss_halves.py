"""Is a loss a mean that may be computed in parts? Two halves of a batch tell."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CellType, FunctionType
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from spartito.accelerators import generator_states, set_generator_states
from spartito.data.batch import Batch
from spartito.engine.logged import listening
from spartito.engine.loss import LossFunction, WeightedLoss, look, mapped, of_torch
from spartito.engine.loss_means import ADVICE, COMPARES
from spartito.errors import UserError
from spartito.notes import warn

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""By how much of the loss the sum of the halves may differ from the whole: rounding."""
_LOW_PRECISION = 2e-2


@dataclass(slots=True)
class Comparisons:
    """What halves of the first batches have told of a training's loss.

    Attributes:
        left: So many batches are still compared.
        agreed: Whether the halves of one made the loss of the whole.
    """

    left: int = 3
    agreed: bool = False

    def look(
        self, loss: LossFunction | None, output: Any, batch: Batch, found: WeightedLoss
    ) -> WeightedLoss:
        """``found`` with the doubt that halves of the batch raise, or without one that they end.

        Args:
            loss: The user's function, of which any part can be asked.
            output: The model's, for the rows of ``batch``.
            batch: At least two rows, else there is nothing to compare.
            found: The loss of the whole.
        """
        if loss is None or of_torch(loss):
            return found
        if self.left and (found.is_guess or not found.doubt):
            self.left -= 1
            agree = compare_halves(loss, output, batch, found)
            if agree is False:
                doubt = found.doubt or COMPARES
                return structs.replace(found, doubt=doubt, is_guess=False)
            self.agreed = self.agreed or agree is True
        if found.is_guess and self.agreed:
            return structs.replace(found, doubt="", is_guess=False)
        return found


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


def doubt(what: str, deterministic: bool) -> None:
    """Refuse a loss whose parts make no exact mean, or warn of it once.

    Args:
        what: `WeightedLoss.doubt`.
        deterministic: Whether the training is to equal that of one device.

    Raises:
        UserError: It is deterministic.
    """
    if deterministic:
        raise UserError(f"{what}: each replica computes it of its own part of the batch", ADVICE)
    _say(what)


@lru_cache
def _say(what: str) -> None:
    warn(
        "%s: each replica computes it of its own part of the batch, so the numbers depend on how "
        "many replicas there are. %s",
        what, ADVICE,
    )  # fmt: skip
