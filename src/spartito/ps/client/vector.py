"""A model's tensors as one flat vector: where each lies, and the copies in and out of it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.ps.protocol.layout import BUFFER, STILL, Entry, Layout, Part, Span, runs
from spartito.ps.protocol.memory import dtype_of, flat, is_mixed, is_summed


class Vector:
    """The parameters and buffers of a model, and where each lies in the flat vector.

    A parameter that the optimizer does not know starts with the chief's values, as buffers do;
    if something else changes it, its changes add up as theirs. ``wholes`` stand for tensors of
    which the model has parts.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, wholes: Mapping[str, Tensor] | None = None
    ) -> None:
        group_of = {
            id(parameter): number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        kept = model.state_dict(keep_vars=True)
        learned = dict(model.named_parameters())
        tensors: dict[str, Tensor] = {**learned}
        tensors |= {name: b for name, b in model.named_buffers() if name in kept}
        shown = {**tensors, **(wholes or {})}
        self.layout = Layout(
            Entry(
                name,
                str(tensor.dtype).removeprefix("torch."),
                tuple(shown[name].shape),
                group,
                frozen=group >= 0 and not tensor.requires_grad,
            )
            for name, tensor in tensors.items()
            for group in (group_of.get(id(tensor), STILL if name in learned else BUFFER),)
        )
        self.tensors = [shown[entry.name] for entry in self.layout.entries]


@dataclass(frozen=True, slots=True)
class _Location:
    """Where (a part of) an entry lies in some memory."""

    entry: int
    view: Tensor  # of the memory: shaped as the tensor if whole, else flat
    whole: bool
    begin: int
    end: int
    summed: bool


class SpanCopies:
    """Copies between a model's tensors and the memory of one span, uint8 ``(bytes,)``."""

    def __init__(self, vector: Vector, span: Span, memory: Tensor) -> None:
        entries, self._runs = vector.layout.entries, runs(vector.layout, span)
        self._locations = [
            [
                _locate(vector.tensors[part.entry], part, entries[part.entry].dtype, span, memory)
                for part in run.parts
            ]
            for run in self._runs
        ]
        self._tensors = vector.tensors
        self._views = [[location.view for location in locations] for locations in self._locations]
        self._here = [self._tensors[part.entry] for run in self._runs for part in run.parts]
        self._find_targets()
        self._flat = [
            memory[run.start - span.start : run.stop - span.start].view(dtype_of(run.dtype))
            for run in self._runs
        ]
        numbers = range(len(self._runs))
        self._others = [number for number in numbers if not self._runs[number].learns]
        mixed = [number for number in numbers if is_mixed(self._runs[number].dtype)]
        self._mixed = [number for number in mixed if self._runs[number].learns]
        self._statistics = [number for number in mixed if not self._runs[number].learns]
        self._learned = [
            location for n in numbers if self._runs[n].learns for location in self._locations[n]
        ]
        self._wanted = [location.view for location in self._learned]
        self._all_views = [view for views in self._views for view in views]
        self._blank: set[int] = set()  # entries whose gradient here is 0 already
        self._before: SpanCopies | None = None

    def load(self, changed: Collection[int] | None = None) -> None:
        """The memory's values into the model; ``changed`` leaves out runs where they are alike.

        Buffers are loaded in any case: a forward pass changes the model's.
        """
        self._follow()
        if changed is None or len(changed) == len(self._runs):
            views, targets = self._all_views, self._all_targets
        else:
            chosen = [n for n, run in enumerate(self._runs) if n in changed or run.group == BUFFER]
            views = [view for number in chosen for view in self._views[number]]
            targets = [target for number in chosen for target in self._targets[number]]
        if views:
            torch._foreach_copy_(targets, views)

    def store(self) -> None:
        """The model's values into the memory."""
        self._follow()
        torch._foreach_copy_(self._all_views, self._all_targets)

    def store_gradients(self) -> list[int]:
        """The gradients into the memory; returns the entries that have none, set to 0."""
        absent, views, grads = [], self._wanted, []
        for location in self._learned:
            grad = self._tensors[location.entry].grad
            if grad is None:
                absent.append(location.entry)
            else:
                grads.append(
                    grad if location.whole else self._part(self._like(grad, location), location)
                )
        if absent:
            for location in self._learned:
                if location.entry in absent and location.entry not in self._blank:
                    location.view.zero_()
            views = [location.view for location in self._learned if location.entry not in absent]
        self._blank = set(absent)
        if grads:
            torch._foreach_copy_(views, grads)
        return absent

    def store_moves(self, starts: Sequence[Tensor]) -> None:
        """How far what learns has moved into the memory: ``starts``, by entry, less the values."""
        self._blank = set()
        for location in self._learned:
            now = self._part(self._tensors[location.entry].detach(), location)
            start = self._part(starts[location.entry], location)
            torch.sub(start.to("cpu"), now.to("cpu"), out=location.view)

    def store_changes(self, before: SpanCopies) -> list[int]:
        """The buffers; of what counts how it changed since ``before`` was loaded.

        Returns the entries of runs in which nothing changed; the memory holds nothing for these.
        """
        self._before = before
        if not self._others:
            return []
        absent = []
        self._follow()
        for number in self._others:
            pairs = list(zip(self._targets[number], before._views[number], strict=True))
            pairs = [(now.to("cpu"), old) for now, old in pairs]
            if all(torch.equal(now, old) for now, old in pairs):
                absent += [location.entry for location in self._locations[number]]
                continue
            for location, (now, old) in zip(self._locations[number], pairs, strict=True):
                location.view.copy_(now)
                if location.summed:
                    location.view.sub_(old)
        return absent

    def norm(self, but: Collection[int] = ()) -> float:
        """The L2 norm of the gradients; inf if they or new statistics hold NaN or infinity.

        An infinity that was there before (a mask's) is no new one. Runs ``but`` do not count.
        """
        total = sum(_square(self._flat[n]) for n in self._mixed if n not in but)
        for number in self._statistics:
            now = self._flat[number]
            old = now if self._before is None else self._before._flat[number]
            if number not in but and not _is_finite(now) and _has_news(now, old):
                return inf
        return min(sqrt(total), sys.float_info.max) if isfinite(total) else inf

    def _find_targets(self) -> None:
        """The model's tensors, or their parts, in each run."""
        self._at = [tensor.data_ptr() for tensor in self._here]
        self._targets = [
            [self._part(self._tensors[location.entry].detach(), location) for location in locations]
            for locations in self._locations
        ]
        self._all_targets = [target for targets in self._targets for target in targets]

    def _follow(self) -> None:
        """Find the model's tensors where they lie now: a user may replace their ``data``."""
        if [tensor.data_ptr() for tensor in self._here] != self._at:
            self._find_targets()

    @staticmethod
    def _part(tensor: Tensor, location: _Location) -> Tensor:
        return tensor if location.whole else flat(tensor)[location.begin : location.end]

    def _like(self, grad: Tensor, location: _Location) -> Tensor:
        """The gradient laid out in memory as its parameter."""
        parameter = self._tensors[location.entry]
        if grad.stride() == parameter.stride():
            return grad
        return torch.empty_like(parameter).copy_(grad)


def _locate(tensor: Tensor, part: Part, dtype: str, span: Span, memory: Tensor) -> _Location:
    start = part.offset - span.start
    kind = dtype_of(dtype)
    view = memory[start : start + (part.end - part.begin) * kind.itemsize].view(kind)
    whole = part.end - part.begin == tensor.numel()
    if whole:
        flat(tensor)  # refuses what is not dense
        view = view.as_strided(tensor.shape, tensor.stride(), view.storage_offset())
    return _Location(part.entry, view, whole, part.begin, part.end, is_summed(dtype))


def _square(view: Tensor) -> float:
    """The square of a gradient's L2 norm; inf if it is not finite, else at most a float's most."""
    if view.dtype in (torch.float32, torch.float64):
        total = float(torch.dot(view, view))  # one pass, as fast as a sum
    else:
        wide = view.to(torch.promote_types(view.dtype, torch.float32))
        total = float(torch.linalg.vector_norm(wide)) ** 2
    if isfinite(total):
        return total
    return sys.float_info.max / 1e6 if bool(view.isfinite().all()) else inf


def _is_finite(view: Tensor) -> bool:
    # A sum is one pass without a result to store; only a strange one is looked at closely.
    total = view.sum().item()
    return total - total == 0 or bool(view.isfinite().all())


def _has_news(now: Tensor, old: Tensor) -> bool:
    """Whether a number that is not finite was another one before."""
    return bool((~now.isfinite() & (now != old) & ~((now != now) & (old != old))).any())
