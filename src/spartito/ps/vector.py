"""A model's tensors as one flat vector: where each lies, and the copies in and out of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.errors import UserError
from spartito.ps.layout import BUFFER, Entry, Layout, Part, Span, runs


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of this name: ``float32``."""
    found: torch.dtype = getattr(torch, name)
    return found


def is_summed(name: str) -> bool:
    """Whether changes of a buffer of this dtype add up: it counts something."""
    return name.startswith(("int", "uint8"))


def is_mixed(name: str) -> bool:
    """Whether buffers of this dtype are statistics, whose values are mixed.

    Of what is neither summed nor mixed the newest value counts.
    """
    return name.startswith(("float", "bfloat", "complex")) and not name.startswith("float8")


def mix(values: Tensor, others: Tensor, weight: float) -> None:
    """Move ``values`` by ``weight``, 0 to 1, of the way to ``others``, and never beyond.

    What is equal stays as it is, bit by bit; what is not finite is taken from ``others``.
    """
    mixed = values.lerp(others, weight)
    values.copy_(torch.where(values.isfinite() & (values != others), mixed, others))


PAGE = 4096
STRIDE = 512
"""Bytes by which tensors that an update reads together lie apart within their pages: where all
begin at the same place of a page, a core takes each store for one that the next load waits for
(4K aliasing), and the update takes up to 2.7 times as long."""
_turns = count()


def allocate(span: Span) -> Tensor:
    """Zeroed memory for a span, uint8 ``(bytes,)``, aligned so that all its runs are.

    Each call begins at another place of its page; see `STRIDE`.
    """
    room = torch.zeros(span.size + 2 * PAGE, dtype=torch.uint8)
    first = -room.data_ptr() % PAGE + next(_turns) * STRIDE % PAGE + span.phase
    return room[first : first + span.size]


def apart(tensor: Tensor) -> Tensor:
    """A flat copy of ``tensor`` that begins at a place of its page where others do not."""
    memory = allocate(Span(0, tensor.nbytes)).view(tensor.dtype)
    return memory.copy_(tensor.reshape(-1))


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order in which they lie in memory, as a view."""
    order = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    )
    expected = 1
    for stride, size in order:
        if stride != expected and tensor.numel():
            raise UserError(
                f"a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()}",
                "Parameters on a server are dense: use .contiguous().",
            )
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class Vector:
    """The parameters and buffers of a model, and where each lies in the flat vector.

    A parameter that the optimizer does not know counts as a buffer: all start with the chief's
    values, and nothing changes them.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        group_of = {
            id(parameter): number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        kept = model.state_dict(keep_vars=True)
        tensors: dict[str, Tensor] = dict(model.named_parameters())
        tensors |= {name: b for name, b in model.named_buffers() if name in kept}
        self.layout = Layout(
            Entry(
                name,
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                group_of.get(id(tensor), BUFFER),
            )
            for name, tensor in tensors.items()
        )
        self.tensors = [tensors[entry.name] for entry in self.layout.entries]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where (a part of) an entry lies in some memory."""

    entry: int
    view: Tensor  # of the memory: shaped as the tensor if whole, else flat
    whole: bool
    begin: int
    end: int
    summed: bool


class Copies:
    """Copies between a model's tensors and the memory of one span, uint8 ``(bytes,)``."""

    def __init__(self, vector: Vector, span: Span, memory: Tensor) -> None:
        entries = vector.layout.entries
        self._places = [
            _place(vector.tensors[part.entry], part, entries[part.entry].dtype, span, memory)
            for run in runs(vector.layout, span)
            for part in run.parts
        ]
        self._learned = [p for p in self._places if entries[p.entry].group != BUFFER]
        self._kept = [p for p in self._places if entries[p.entry].group == BUFFER]
        self._tensors = vector.tensors
        self._views = [place.view for place in self._places]
        self._targets = [self._part(vector.tensors[p.entry].detach(), p) for p in self._places]
        floating = [
            (run, memory[run.start - span.start : run.stop - span.start].view(dtype_of(run.dtype)))
            for run in runs(vector.layout, span)
            if is_mixed(run.dtype)
        ]
        self._gradients = [view for run, view in floating if run.group != BUFFER]
        self._statistics = [view for run, view in floating if run.group == BUFFER]
        self._before: Copies | None = None

    def load(self) -> None:
        """The memory's values into the model."""
        torch._foreach_copy_(self._targets, self._views)

    def store(self) -> None:
        """The model's values into the memory."""
        torch._foreach_copy_(self._views, self._targets)

    def store_gradients(self) -> list[int]:
        """The gradients into the memory; answers the entries that have none, set to 0."""
        absent, views, grads = [], [], []
        for place in self._learned:
            grad = self._tensors[place.entry].grad
            if grad is None:
                absent.append(place.entry)
                place.view.zero_()
            else:
                views.append(place.view)
                grads.append(grad if place.whole else self._part(self._like(grad, place), place))
        if grads:
            torch._foreach_copy_(views, grads)
        return absent

    def store_changes(self, before: Copies) -> None:
        """The buffers; of what counts how it changed since ``before`` was loaded."""
        self._before = before
        for place, old in zip(self._kept, before._kept, strict=True):
            now = self._part(self._tensors[place.entry].detach(), place)
            place.view.copy_(now)
            if place.summed:
                place.view.sub_(old.view)

    def is_finite(self) -> bool:
        """Whether gradients and new statistics hold neither NaN nor infinity.

        An infinity that was there before (a mask's) is no new one.
        """
        before = self._statistics if self._before is None else self._before._statistics
        return all(map(_is_finite, self._gradients)) and all(
            _is_finite(now) or not _has_news(now, old)
            for now, old in zip(self._statistics, before, strict=True)
        )

    @staticmethod
    def _part(tensor: Tensor, place: _Place) -> Tensor:
        return tensor if place.whole else flat(tensor)[place.begin : place.end]

    def _like(self, grad: Tensor, place: _Place) -> Tensor:
        """The gradient laid out in memory as its parameter."""
        parameter = self._tensors[place.entry]
        if grad.stride() == parameter.stride():
            return grad
        return torch.empty_like(parameter).copy_(grad)


def _place(tensor: Tensor, part: Part, dtype: str, span: Span, memory: Tensor) -> _Place:
    start = part.offset - span.start
    kind = dtype_of(dtype)
    view = memory[start : start + (part.end - part.begin) * kind.itemsize].view(kind)
    whole = part.end - part.begin == tensor.numel()
    if whole:
        flat(tensor)  # refuses what is not dense
        view = view.as_strided(tensor.shape, tensor.stride(), view.storage_offset())
    return _Place(part.entry, view, whole, part.begin, part.end, is_summed(dtype))


def _is_finite(view: Tensor) -> bool:
    # A sum is one pass without a result to store; only a strange one is looked at closely.
    total = view.sum().item()
    return total - total == 0 or bool(view.isfinite().all())


def _has_news(now: Tensor, old: Tensor) -> bool:
    """Whether a number that is not finite was another one before."""
    return bool((~now.isfinite() & (now != old) & ~((now != now) & (old != old))).any())
