"""An update that replicas divide among them: each makes its slice, and its state exists once.

ZeRO's first stage (Rajbhandari et al. 2020) and weight-update sharding (Xu et al. 2020), for the
CPUs of one machine, cut by elements. A replica packs only what others sum, adds what came for its
slice to its own gradients, updates views of the user's own tensors with torch's fused kernel, and
copies the slices of the others. The numbers are bitwise those of an update by each replica.

The optimizer's state lies in memory that all share (`engine.shared_optimizer_state`); before a step
of the optimizer's own it becomes private again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from spartito.collectives.collective import Piggybacked
from spartito.collectives.memory.shared_memory import SharedMemoryCollective
from spartito.collectives.memory.slices import cut
from spartito.engine.devices.host_reads import Number
from spartito.engine.devices.memory_layout import dense, overlap, sample
from spartito.engine.gradients.gradient_sum import (
    PackedGradients,
    clip_factor,
    different_batches,
    writes_gradients,
)
from spartito.engine.updates import fused_update
from spartito.engine.updates.shared_optimizer_state import VERSION, Cut, SharedState

NOT_SHARED = 1.0  # this replica could divide updates, once the state is shared
UNABLE = 2.0**20  # more than there are replicas


class SlicedGradients(PackedGradients):
    """As `PackedGradients`, for CPUs of one machine; updates are divided where they can be.

    They cannot where an optimizer does more than its fused kernel (`fused.kernel_of`), or where a
    parameter does not lie in one section of memory of its own. All replicas decide the same, in the
    synchronization that every update has: what one cannot, none does.
    """

    def __init__(self, optimizer: Optimizer, collective: SharedMemoryCollective) -> None:
        self._shared = collective
        self._divided = self._may_share = self._has_no_space = False
        self._was_touched, self._steps, self._counts = False, 0, fused_update.Counts()
        self._state: SharedState | None = None
        super().__init__(optimizer, collective)
        _make_private_before_steps(self, optimizer)

    def _plan(self) -> None:
        self._checked = False
        self._laid: list[tuple[Any, ...]] = []
        self._groups: list[int] = []
        if self._state is not None:
            self._state.make_private()
        parameters, rank, world = self.parameters, self._shared.rank, self._shared.world_size
        sizes = [(p.numel(), p.element_size()) for p in parameters]
        sections, size = cut(sizes, world)
        self._shape = [dense(p) for p in parameters]
        self._cut = Cut(parameters, self._shape, sections, size, rank)
        self._own, self._foreign = self._cut.own, self._cut.foreign
        self._state = SharedState(self._optimizer, self._shared, self._cut)
        dtypes, numel = {p.dtype for p in parameters}, sum(numel for numel, _ in sizes)
        kind = dtypes.pop() if len(dtypes) == 1 else None
        slices = self._slices = self._shared.slices(size, numel, kind)
        views = self._cut.views
        self._sent = views(self._foreign, lambda p, d: slices.sent(p, rank, d))
        self._received = [
            views(self._own, lambda p, d, other=other: slices.sent(p, other, d))  # type: ignore[misc]
            for other in range(world)
            if other != rank
        ]
        self._own_results = views(self._own, slices.result)
        self._foreign_results = views(self._foreign, slices.result)
        self._whole_results = views(self._cut.wholes, slices.result)
        self._shows_values = False  # what lies in the results now
        self._versions = [parameter._version for parameter in self.parameters]

    def reduce(self, piggybacked: Piggybacked = ()) -> tuple[Number, Number, Piggybacked]:
        packed = self._learning()
        grads = [p.grad for p in packed]
        grads = [g.detach() if g is not None and g.requires_grad else g for g in grads]
        self._send(grads)
        obstacle = self._obstacle()
        absent = sum(grad is None for grad in grads) if self.counts else 0
        weight = float(self._shared.rank == 0) if self.normalized else float(self.weight)
        brought = (weight, float(self.loss), *piggybacked, obstacle, float(absent))
        total = self._slices.meet((*brought, self.loss_divisor))
        if total[-1] != self.loss_divisor * self._shared.world_size:
            raise different_batches(self.loss_divisor)
        self._sums = self._sum(grads)
        if self._sums and total[0] and total[0] != self.loss_divisor:
            torch._foreach_mul_(self._sums, self.loss_divisor / total[0])
        self.absent = total[-2]
        self._idle = self._unused(packed) if self.absent else frozenset()
        self._divided = total[-3] == 0 and total[0] != 0
        self._may_share = total[-3] < UNABLE
        if not self._divided:
            self._give_back()
        return total[0], total[1], total[2:-3]

    def norm(self) -> Tensor:
        if not self._divided:
            return super().norm()
        norms = torch._foreach_norm(self._sums) if self._sums else ()
        own = sum(norm * norm for norm in map(float, norms))
        parts = self._shared.all_gather(torch.tensor([own], dtype=torch.float64))
        return torch.cat(parts).sum().sqrt()

    def clip(self, norm: float, total: Tensor) -> None:
        if not self._divided:
            super().clip(norm, total)
        elif self._sums:
            scale = clip_factor(norm, total)
            torch._foreach_mul_(self._sums, scale.item())

    def update(self, step: Callable[[], None]) -> None:
        if self._divided:
            self._update()
        else:
            self.make_private()  # also where a kernel is called without the hooks of a step
            step()
            if self._may_share and not self._has_no_space:
                kernel = fused_update.kernel_of(self._optimizer)
                kernel = kernel if self._lies_apart() else None
                self._has_no_space = not self._shared_state.share(kernel, self._number)
        self._versions = [*map(VERSION, self.parameters)]
        self._shows_values = self._divided

    def written(self) -> None:
        self._shows_values = False
        self._versions = [*map(VERSION, self.parameters)]

    def compared(self) -> None:
        versions = [parameter._version for parameter in self.parameters]
        if self._was_touched or versions != self._versions:
            self._laid, self._shows_values = [], False
        self._was_touched, self._versions = False, versions

    def make_private(self) -> None:
        """Replace the state in shared memory by copies, before anything else changes it."""
        self._shared_state.make_private()

    @property
    def _shared_state(self) -> SharedState:
        assert self._state is not None, "planned"
        return self._state

    def _send(self, grads: Sequence[Tensor | None]) -> None:
        """Put the slices of the others where they read them."""
        views, found = [], []
        for section, view in zip(self._foreign, self._sent, strict=True):
            grad = grads[section.tensor]
            if grad is None:
                view.zero_()
            else:
                views.append(view)
                found.append(self._cut.part(section, grad))
        if views:
            torch._foreach_copy_(views, found)

    def _sum(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """One's own slice over all replicas, summed in their order."""
        into: list[Tensor]
        into, *rest = self._received
        first = max(self._shared.rank, 1) - 1
        for other in rest[:first]:
            _add(into, other)
        with_grads = [n for n, section in enumerate(self._own) if grads[section.tensor] is not None]
        _add(
            [into[n] for n in with_grads],
            [self._cut.part(self._own[n], grads[self._own[n].tensor]) for n in with_grads],
        )
        for other in rest[first:]:
            _add(into, other)
        return into

    def _give_back(self) -> None:
        """Show all the sums: each replica makes the whole update, or none."""
        if self._sums:
            torch._foreach_copy_(self._own_results, self._sums)
        self._slices.finish()
        is_private = writes_gradients(self._optimizer)
        for parameter, result in zip(self.parameters, self._whole_results, strict=True):
            shown = result.clone() if is_private else result
            parameter.grad = None if id(parameter) in self._idle else shown

    def _obstacle(self) -> float:
        """What keeps this replica from dividing the next update: 0 is nothing."""
        self._steps += 1
        kernel = self._kernel = fused_update.kernel_of(self._optimizer)
        if self.whole or kernel is None or self._has_no_space or not self._lies_apart():
            return UNABLE
        self._was_touched = self._was_touched or self._is_touched()
        if self._was_touched:
            return UNABLE
        if any(parameter.grad is not None for parameter in self._frozen):
            return UNABLE
        shown = self._shared_state.is_shown(kernel, self._number, self._steps)
        return 0.0 if shown else NOT_SHARED

    def _lies_apart(self) -> bool:
        """Whether the parameters are ordinary ones, each in one section of memory of its own."""
        laid = [(p.data_ptr(), p.dtype, p.stride(), type(p)) for p in self.parameters]
        groups = [len(group["params"]) for group in self._optimizer.param_groups]
        if laid != self._laid or groups != self._groups:
            self._was_touched = self._was_touched or bool(self._laid and laid != self._laid)
            self._laid, self._groups = laid, groups
            self._look_at_parameters()
        return self._is_apart

    def _is_touched(self) -> bool:
        """Whether something other than an update has changed a parameter since the last one.

        Then each replica updates all, so that one that did so alone is found at the end of the
        epoch; divided, its values would be overwritten here, or taken over there. A write through
        ``.data`` leaves no trace: a sample of one section is looked at, another one in each step.
        """
        if [*map(VERSION, self.parameters)] != self._versions:
            return True
        if not (self._shows_values and self._samples):
            return False
        here, shown = self._samples[self._steps % len(self._samples)]
        return here != shown

    def _look_at_parameters(self) -> None:
        self._number = {id(p): number for number, p in enumerate(self.parameters)}
        members = [
            [p for p in group["params"] if id(p) in self._number]
            for group in self._optimizer.param_groups
        ]
        numbers = [{self._number[id(p)] for p in each} for each in members]
        self._by_group = [
            [n for n, section in enumerate(self._own) if section.tensor in each] for each in numbers
        ]
        laid = [(p.shape, p.stride()) for p in self.parameters]
        self._is_apart = (
            all(map(fused_update.alike, members))
            and laid == self._shape
            and not overlap([(p.data_ptr(), p.nbytes) for p in self.parameters])
        )
        tensors = [parameter.detach() for parameter in self.parameters if self._is_apart]
        self._targets = [
            self._cut.part(section, tensors[section.tensor]) for section in self._own if tensors
        ]
        self._copies = [
            self._cut.part(section, tensors[section.tensor]) for section in self._foreign if tensors
        ]
        self._samples = [
            (sample(here), sample(shown))
            for here, shown in zip(
                [*self._targets, *self._copies],
                [*self._own_results, *self._foreign_results] if tensors else [],
                strict=True,
            )
        ]

    def _update(self) -> None:
        """Update one's own slice, publish it, and take those of the others."""
        optimizer, kernel = self._optimizer, self._kernel
        assert kernel is not None, "decided in `reduce`"
        state, own_state = optimizer.state, self._shared_state.own
        steps = self._shared_state.steps
        if kernel.counts and (self._idle or not steps):
            steps = [state[p]["step"] for p in self.parameters if id(p) not in self._idle]
            torch._foreach_add_(steps, fused_update.ONE, alpha=1.0)
            counted = iter(steps)
            steps = [
                fused_update.ONE if id(p) in self._idle else next(counted) for p in self.parameters
            ]
        elif kernel.counts:
            self._counts.up(steps)
        for group, numbers in zip(optimizer.param_groups, self._by_group, strict=True):
            if self._idle:
                used = [self.parameters[self._own[n].tensor] for n in numbers]
                numbers = [n for n, p in zip(numbers, used, strict=True) if id(p) not in self._idle]
            if not numbers:
                continue
            kernel.update(
                group,
                [self._targets[n] for n in numbers],
                [self._sums[n] for n in numbers],
                [[own_state[key][n] for n in numbers] for key in kernel.keys(group)],
                [steps[self._own[n].tensor] for n in numbers] if kernel.counts else [],
            )
        fused_update.mark(optimizer)
        if self._targets:
            torch._foreach_copy_(self._own_results, self._targets)
        self._slices.finish()
        if self._copies:
            torch._foreach_copy_(self._copies, self._foreign_results)


def _make_private_before_steps(gradients: SlicedGradients, optimizer: Optimizer) -> None:
    """Have the state made private before a step of the optimizer's own, whoever calls it."""
    found = weakref.ref(gradients)

    @fused_update.OurHook
    def hook(*_: object) -> None:
        alive = found()
        if alive is not None:
            alive.make_private()

    optimizer.register_step_pre_hook(hook)


def _add(into: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    if into:
        torch._foreach_add_(list(into), list(parts))
