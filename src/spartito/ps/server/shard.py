"""One server's part of the flat vector: its memory, the optimizer on it, and what it applied."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.engine.devices.memory_layout import shaped
from spartito.engine.gradients.gradient_sum import clip_factor
from spartito.engine.updates import fused_update
from spartito.numeric import is_number
from spartito.ps.protocol.layout import Layout, Run, Span, runs, unused
from spartito.ps.protocol.memory import allocate, apart, dtype_of, flat, is_mixed, is_summed, mix
from spartito.ps.protocol.options import KERNELS, SETTINGS, set_options
from spartito.ps.protocol.slots import COUNTERS, State, is_elementwise, merge_state, slots, within

MOST_MEMORIES = 64
"""For so many an update is prepared, which keeps the memory itself."""


class Shard:
    """The values of one span, updated in place by the user's own optimizer.

    ``optimizer`` is rebound from the user's parameters to few long ones that lie here.
    ``values`` is uint8 ``(bytes of the span,)``.
    """

    def __init__(
        self, layout: Layout, span: Span, optimizer: Optimizer, tensors: Sequence[Tensor]
    ) -> None:
        self.layout, self.span, self.optimizer = layout, span, optimizer
        self._tensors = tensors
        self.values = allocate(span)
        self.slots = slots(layout, span, not is_elementwise(optimizer))
        self.runs = runs(layout, span)
        self._kept = [run for run in self.runs if not run.learns]
        self._parameters = [nn.Parameter(self._view(self.values, run)) for run in self.slots]
        self._close = True  # the optimizer's state lies where torch has put it
        self._stepper = fused_update.Stepper()
        self._prepared: dict[tuple[int, ...], list[fused_update.Prepared]] = {}
        self._rebind(tensors)

    def update(
        self, push: Tensor, absent: Sequence[int] = (), rate: float = 1.0, fresh: float = 1.0
    ) -> None:
        """One step of the optimizer with the gradients in ``push``, uint8 ``(bytes,)``.

        The entries ``absent`` have no gradient, or did not change, and stay as they are.
        ``rate`` scales the learning rate of this update. Of the buffers whole numbers grow by
        what ``push`` holds at their offset; statistics move ``fresh`` (0 to 1) of the way to it.
        """
        known = self._prepared.get((push.data_ptr(), *absent)) if rate == 1.0 else None
        if known is None:
            self._step(push, absent, rate)
        else:
            for prepared in known:
                prepared.step()
        if not self._kept:
            return
        still = unused(self._kept, absent)
        for number, run in enumerate(self._kept):
            if number in still:
                continue
            values, pushed = self._view(self.values, run), self._view(push, run)
            if is_summed(run.dtype):
                values.add_(pushed)
            elif is_mixed(run.dtype):
                mix(values, pushed, fresh)
            else:
                values.copy_(pushed)

    def _step(self, push: Tensor, absent: Sequence[int], rate: float) -> None:
        """The step of the optimizer in `update`; what comes again is prepared."""
        idle = unused(self.slots, absent)
        kept = self._keep(absent, idle) if absent else []
        begun = self.optimizer.state
        new = [n for n, p in enumerate(self._parameters) if p not in begun] if absent else []
        gradients = self._gradients(push)
        for number, (parameter, view) in enumerate(zip(self._parameters, gradients, strict=True)):
            parameter.grad = None if number in idle else view
        rates = [group["lr"] for group in self.optimizer.param_groups] if rate != 1.0 else []
        for group, own in zip(self.optimizer.param_groups, rates, strict=False):
            group["lr"] = own * rate
        self._stepper.step(self.optimizer)
        for group, own in zip(self.optimizer.param_groups, rates, strict=False):
            group["lr"] = own
        for tensor, old in kept:
            tensor.copy_(old)
        if new:
            self._forget(new, absent)
        if self._close:
            self._spread()
        elif not kept and (found := fused_update.prepare(self.optimizer)) is not None:
            if len(self._prepared) == MOST_MEMORIES:
                self._prepared.clear()
            self._prepared[push.data_ptr(), *absent] = found

    def mix(
        self,
        total: Tensor,
        push: Tensor,
        weight: float,
        count: int,
        absent: Sequence[int] = (),
        blank: Collection[int] = (),
    ) -> None:
        """Add ``weight`` times the gradients of ``push``, the ``count``-th, to ``total``.

        Of the buffers whole numbers are added, and statistics are the mean of all so far, where
        those of the entries ``absent`` are what they are here. ``total`` has nothing yet for the
        entries ``blank``.
        """
        idle = unused(self.slots, absent)
        for number, run in enumerate(self.slots):
            if number not in idle:
                self._view(total, run).add_(self._view(push, run), alpha=weight)
        still, empty = unused(self._kept, absent), unused(self._kept, blank)
        for number, run in enumerate(self._kept):
            if number in still and (number in empty or count == 1 or not is_mixed(run.dtype)):
                continue
            sums, values = self._view(total, run), self._view(self.values, run)
            pushed = values if number in still else self._view(push, run)
            if number in empty and is_mixed(run.dtype):
                sums.copy_(values)
            if is_summed(run.dtype):
                sums.add_(pushed)
            elif is_mixed(run.dtype) and count > 1:
                mix(sums, pushed, 1 / count)
            else:
                sums.copy_(pushed)

    def learned(self, absent: Sequence[int], *memories: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """The same elements of several memories of the span, run by run.

        Only parameters, and none of the entries ``absent``.
        """
        idle, missing = unused(self.slots, absent), frozenset(absent)
        for number, run in enumerate(self.slots):
            if number in idle:
                continue
            views = [self._view(memory, run) for memory in memories]
            if missing.isdisjoint(part.entry for part in run.parts):
                yield tuple(views)
                continue
            for part in run.parts:
                if part.entry not in missing:
                    yield tuple(flat(view)[within(run, part)] for view in views)

    def divide(self, total: Tensor, weight: float, count: int) -> None:
        """Make the sum of `mix` a mean: gradients by their weight, counts by their count."""
        for run in self.slots:
            self._view(total, run).mul_(1 / weight if weight else 0.0)
        for run in self._kept:
            if is_summed(run.dtype):
                self._view(total, run).div_(count, rounding_mode="floor")

    def clip(self, push: Tensor, norm: float) -> None:
        """Scale the gradients so that their global L2 norm is at most ``norm``."""
        grads = [self._view(push, run) for run in self.slots]
        total = torch.nn.utils.get_total_norm(grads)
        torch._foreach_mul_(grads, clip_factor(norm, total))

    def accepts(self, options: Sequence[Mapping[str, Any]]) -> bool:
        """Whether these can be options of our parameter groups, for each group some.

        Schedules bring options of their own, such as ``initial_lr``.
        """
        groups = self.optimizer.param_groups
        return len(options) == len(groups) and all(
            name != "params" and _may_become(name, value, group.get(name))
            for group, new in zip(groups, options, strict=True)
            for name, value in new.items()
        )

    def set(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Take over the options of the parameter groups, as `settings` returns them.

        What the groups here do not have, such as a schedule's ``initial_lr``, is left out.
        """
        set_options(self.optimizer.param_groups, options)
        if any(group.keys() - {"lr"} for group in options):
            self._prepared.clear()  # it may have other state now

    def state(self) -> State:
        """The optimizer's tensors, by slot and key. Not copied.

        What has a value for each element is flat, in the order of the memory; numbers are
        0-dim tensors.
        """
        found: State = {}
        for number, parameter in enumerate(self._parameters):
            long = self._long(number)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor | int | float):
                    other = value if isinstance(value, Tensor) else torch.tensor(value)
                    found[number, key] = flat(long[key]) if key in long else other
        return found

    def load_state(self, state: State) -> None:
        """Take back what `state` returned."""
        self.optimizer.state.clear()
        self._prepared.clear()
        self._close = True
        for (number, key), value in state.items():
            parameter = self._parameters[number]
            made = value.clone()
            if key not in COUNTERS and value.numel() == parameter.numel():
                made = torch.empty_like(parameter.detach(), dtype=value.dtype)
                flat(made).copy_(value.reshape(-1))
            self.optimizer.state[parameter][key] = made

    def _view(self, memory: Tensor, run: Run) -> Tensor:
        """A run in some memory of the span, shaped as the optimizer sees it."""
        start = run.start - self.span.start
        view = memory[start : start + run.stop - run.start].view(dtype_of(run.dtype))
        if not run.learns or is_elementwise(self.optimizer):
            return view
        return shaped(view, self._tensors[run.parts[0].entry])

    def _gradients(self, memory: Tensor) -> list[Tensor]:
        """The gradients in some memory of the span, one for each slot."""
        return [self._view(memory, run) for run in self.slots]

    def forget(self, memory: Tensor) -> None:
        """Nobody pushes from this ``memory`` any more."""
        for known in [known for known in self._prepared if known[0] == memory.data_ptr()]:
            del self._prepared[known]

    def _spread(self) -> None:
        """Once the optimizer has made its state, move it to where its tensors lie apart."""
        for parameter in self._parameters:
            state = self.optimizer.state.get(parameter, {})
            for key, value in state.items():
                alike = isinstance(value, Tensor) and value.shape == parameter.shape
                if alike and value.stride() == parameter.stride():
                    state[key] = apart(flat(value)).as_strided(value.shape, value.stride())
            self._close = self._close and not state

    def _rebind(self, tensors: Sequence[Tensor]) -> None:
        """Point the optimizer's groups, and the state that a fresh one has, at our tensors."""
        begun = dict(self.optimizer.state)
        state = merge_state(self.slots, [begun.get(tensor, {}) for tensor in tensors])
        for number, group in enumerate(self.optimizer.param_groups):
            group["params"] = [
                parameter
                for parameter, run in zip(self._parameters, self.slots, strict=True)
                if run.group == number
            ]
        self.load_state(state)

    def _keep(self, absent: Sequence[int], idle: frozenset[int]) -> list[tuple[Tensor, Tensor]]:
        """The values and the state of these entries, each with a copy to put back.

        Slots that are ``idle`` take no part.
        """
        missing, kept = frozenset(absent), []
        for number, run in enumerate(self.slots):
            for part in run.parts if number not in idle else ():
                if part.entry in missing:
                    for tensor in (self._parameters[number].data, *self._long(number).values()):
                        section = flat(tensor)[within(run, part)]
                        kept.append((section, section.clone()))
        return kept

    def _forget(self, numbers: Sequence[int], absent: Sequence[int]) -> None:
        """Begin the state of these entries anew, where an update has just made it."""
        for number in numbers:
            for part in self.slots[number].parts:
                for key, tensor in self._long(number).items():
                    # All begin with zeros but Rprop's steps, which a gradient of 0 leaves alone.
                    if part.entry in absent and key != "step_size":
                        flat(tensor)[within(self.slots[number], part)] = 0

    def _long(self, number: int) -> dict[str, Tensor]:
        """The state of a slot that has a value for each element."""
        parameter = self._parameters[number]
        return {
            key: value
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
            and value.numel() == parameter.numel()
            and key not in COUNTERS
        }


def _may_become(name: str, value: Any, old: Any) -> bool:
    """Whether the option ``name`` may change from ``old`` to ``value`` while we train.

    Numbers change, and stay finite ones. What decides which state an optimizer has does not
    change: it would fail at the next update.
    """
    if isinstance(old, bool) and name not in KERNELS:
        return value is old
    if isinstance(old, int | float | Tensor) and not isinstance(old, bool):
        return is_number(value) and isfinite(value) and (name != "betas" or 0 <= value < 1)
    if isinstance(old, list | tuple):
        alike = isinstance(value, list | tuple) and len(value) == len(old)
        return alike and all(_may_become(name, *pair) for pair in zip(value, old, strict=True))
    if isinstance(old, str):
        return isinstance(value, str)
    return isinstance(value, SETTINGS) and (not isinstance(value, float) or isfinite(value))
