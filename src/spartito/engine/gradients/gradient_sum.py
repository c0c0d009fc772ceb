"""Gradients of one optimizer's parameters, summed over the replicas and weighted exactly.

Every backward pass adds ``sum of local losses / loss_divisor`` to the gradients, where the loss
divisor is the size of the global batch as planned. What is left is the factor loss divisor /
(weight that came), which is 1 unless examples were missing, losses weigh otherwise, or batches
are accumulated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import isnan
from operator import is_
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.accelerators import wide
from spartito.collectives.collective import Collective, Piggybacked, Reducer
from spartito.collectives.process_group import unless_there, works_there
from spartito.engine.devices.host_reads import Number
from spartito.engine.devices.memory_layout import shaped
from spartito.engine.gradients.compression import CompressedReducer, Compression, Whole
from spartito.engine.modules.kept_values import gradients_aside
from spartito.engine.updates.fused_update import is_bare
from spartito.engine.updates.optimizers import optimizer_parameters
from spartito.errors import TaskLostError, UserError


@dataclass(frozen=True, slots=True)
class Accumulated:
    """Gradients of batches that are no update yet, summed over all replicas, and their weight."""

    grads: Sequence[Tensor | None]
    loss_divisor: float
    weight: float
    loss: float


class Gradients(ABC):
    """What waits for the next update of one optimizer.

    The optimizer is asked for its parameters before every backward pass and every update: groups
    that are added, and parameters that are unfrozen, replaced or taken out later, are followed.
    ``learned``: parameters that did so under gradients before these.
    """

    def __init__(self, optimizer: Optimizer, learned: Sequence[nn.Parameter] = ()) -> None:
        self._optimizer = optimizer
        self._given: list[nn.Parameter] = []
        self._frozen: list[nn.Parameter] = []
        self.parameters = list(learned)
        """Those that learn, or did."""
        self.loss_divisor = 0.0
        self.weight: Number = 0.0
        self.loss: Number = 0.0
        self.epoch = 0
        """That of the batch that is computed."""
        self.backward_calls = 0
        """Backward passes of a loop of the user's own since the last update, on all replicas."""
        self.normalized = False
        self.summed = False
        """Whether ``.grad`` is what the update uses: summed over all replicas, and weighted."""
        self.whole = False
        """Whether the next update needs all of the reduced gradients on every replica."""
        self._take(optimizer_parameters(optimizer))

    def begin(self, loss_divisor: float) -> float:
        """Before a backward pass over a batch planned as ``loss_divisor`` examples.

        Returns the divisor to use: it stays that of the first batch until `clear`, so that all
        replicas know it, also those that had no rows. Gradients that the user dropped
        (``optimizer.zero_grad()``) take their weight along.
        """
        self.refresh()
        if self.counts and not self._holds_any:
            self.weight = self.loss = 0.0
        self.loss_divisor = self.loss_divisor or loss_divisor
        return self.loss_divisor

    def before_forward(self, is_last: bool, epoch: int) -> None:
        """Before a forward pass; ``is_last``: an update follows on its backward pass."""
        self.epoch = epoch

    def gather(self) -> None:  # noqa: B027 - most have them there
        """Let all parameters show their values until the next update; all replicas call it."""

    def rescale(self, loss_divisor: float) -> None:
        """Divide what waits by another loss_divisor, as the next backward pass does."""
        if self.loss_divisor != loss_divisor:
            scale_gradients(self.parameters, self.loss_divisor / loss_divisor)
            self.loss_divisor = loss_divisor

    def normalize(self, weight: Number, scaled: set[int] | None = None) -> None:
        """Make what waits the mean of its own batch, which weighs so much over all replicas.

        Args:
            weight: Of the batch.
            scaled: By id, the parameters to leave out; those that are scaled are added.
        """
        if not self.normalized and (isinstance(weight, Tensor) or weight):
            done = set[int]() if scaled is None else scaled
            own = [parameter for parameter in self.parameters if id(parameter) not in done]
            scale_gradients(own, quotient(self.loss_divisor, weight))
            done.update(map(id, own))
        self.normalized, self.loss_divisor = True, 1.0

    def refresh(self) -> None:
        """Take the parameters that the optimizer has now, without what old ones left in ``.grad``.

        All replicas do this at the same point: a new reducer is made by all of them.
        """
        if self.changed:
            self._take(optimizer_parameters(self._optimizer))

    @property
    def changed(self) -> bool:
        """Whether the optimizer has other parameters than before, or more of them learn."""
        given = optimizer_parameters(self._optimizer)
        return not same(given, self._given) or any(p.requires_grad for p in self._frozen)

    def _take(self, given: list[nn.Parameter]) -> None:
        """Take these parameters, of which there may be none."""
        known = {id(parameter) for parameter in self._given}
        learned = {id(parameter) for parameter in self.parameters}
        for parameter in given:
            if id(parameter) not in known:
                parameter.grad = None
        self._given = given
        self.parameters = [p for p in given if p.requires_grad or id(p) in learned]
        chosen = {id(parameter) for parameter in self.parameters}
        self._frozen = [parameter for parameter in given if id(parameter) not in chosen]
        self._plan()

    def go_on(self, before: Gradients) -> None:
        """Take over what ``before`` noted of the batches that wait."""
        self.loss_divisor, self.weight, self.loss = before.loss_divisor, before.weight, before.loss

    def _plan(self) -> None:  # noqa: B027 - not all have something to do
        """Prepare for the parameters that learn now."""

    def discarding(self) -> AbstractContextManager[None]:
        """For a backward pass that counts for nothing: afterwards what waits is as it was."""
        return gradients_aside(self.parameters)

    def add(self, loss: Number, weight: Number) -> None:
        """After a backward pass: the sum of the local losses, and how much they weigh."""
        self.loss = self.loss + loss if self.counts else loss
        self.weight = self.weight + weight if self.counts else weight

    @property
    def counts(self) -> bool:
        """Whether a batch with a weight waits on this replica."""
        weight = self.weight  # of a number most often: Tensor's own check is asked last
        return weight != 0 if type(weight) is float else isinstance(weight, Tensor) or weight != 0

    @property
    def _holds_any(self) -> bool:
        """Whether gradients of batches before wait here."""
        return any(parameter.grad is not None for parameter in self.parameters)

    @abstractmethod
    def reduce(self, piggybacked: Piggybacked = ()) -> tuple[Number, Number, Piggybacked]:
        """Make every ``.grad`` the weighted mean over all replicas.

        Returns weight, loss and each piggybacked scalar, summed over the replicas.
        """

    def accumulated(self) -> Accumulated:
        """What waits for the update, over all replicas, which all call this. It stays as it is."""
        grads = [None if p.grad is None else p.grad.detach().clone() for p in self.parameters]
        return Accumulated(grads, self.loss_divisor, float(self.weight), float(self.loss))

    def load_accumulated(self, waiting: Accumulated, rank: int) -> None:
        """Go on with what `waiting` returned, under any number of replicas, for `parameters`."""
        self.clear()
        self.loss_divisor = waiting.loss_divisor
        if rank == 0:  # the sum over the replicas is what it was
            self.weight, self.loss = waiting.weight, waiting.loss
        for parameter, grad in zip(self.parameters, waiting.grads, strict=True):
            if rank == 0:
                parameter.grad = None if grad is None else torch.empty_like(parameter).copy_(grad)

    def clear(self) -> None:
        """Forget it all, after the update."""
        self.backward_calls, self.normalized, self.summed = 0, False, False
        self.loss_divisor = self.weight = self.loss = 0.0
        for parameter in self.parameters:
            parameter.grad = None

    def update(self, step: Callable[[], None]) -> None:
        """Make the update of the reduced gradients; ``step`` is the optimizer's."""
        step()

    def leave(self) -> None:  # noqa: B027 - few have something to do
        """Let go of the parameters: other gradients replace these, or no more steps come."""

    def written(self) -> None:  # noqa: B027 - few have something to do
        """Others have given new values to the parameters, in place and alike on all replicas."""

    def compared(self) -> None:  # noqa: B027 - few have something to do
        """The parameters are equal on all replicas now: compared, or just loaded."""

    def own_gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The reduced gradients that this replica updates with, and what they are of."""
        return ((p, p.grad) for p in self.parameters if p.grad is not None)

    def sum(self, number: Tensor) -> Tensor:
        """Over the replicas that have different `own_gradients`, in place."""
        return number

    def norm(self) -> Tensor:
        """The L2 norm of the reduced gradients that are here, a scalar."""
        return torch.nn.utils.get_total_norm(
            [p.grad for p in self.parameters if p.grad is not None]
        )

    def clip(self, norm: float, total: Tensor) -> None:
        """Scale the reduced gradients by ``norm / total`` where their norm ``total`` is larger."""
        present = [p for p in self.parameters if p.grad is not None]
        grads = [p.grad for p in present if p.grad is not None]
        if not grads:
            return
        scale = clip_factor(norm, total)
        # Not in place: a reduced gradient may lie in memory that all replicas read.
        for parameter, grad in zip(present, torch._foreach_mul(grads, scale), strict=True):
            parameter.grad = grad


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether these are the same tensors in the same order."""
    return len(one) == len(other) and all(map(is_, one, other))


class LocalGradients(Gradients):
    """One replica: the gradients are where backward left them."""

    def reduce(self, piggybacked: Piggybacked = ()) -> tuple[Number, Number, Piggybacked]:
        self.refresh()
        if self.counts and not self.normalized:
            scale_gradients(self.parameters, quotient(self.loss_divisor, self.weight))
        return self.weight, self.loss, piggybacked

    def clip(self, norm: float, total: Tensor) -> None:
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if grads:  # in place, as torch does: nobody else reads them
            factor = clip_factor(norm, total)
            torch._foreach_mul_(grads, factor.to(grads[0].device))  # a norm may come by the host


def clip_factor(norm: float, total: Tensor) -> Tensor:
    """What makes gradients of the L2 norm ``total`` those of ``norm`` at most, as torch has it."""
    return torch.clamp(norm / (total + 1e-6), max=1.0)


def quotient(loss_divisor: float, weight: Number) -> Number:
    """What makes the mean of gradients that were divided by ``loss_divisor``; 0 for no weight."""
    if isinstance(weight, Tensor):
        return (loss_divisor / wide(weight)).nan_to_num(posinf=0.0)
    return loss_divisor / weight if weight else 0.0


def scale_gradients(parameters: Sequence[nn.Parameter], factor: Number) -> None:
    """Multiply the gradients that there are, in place."""
    if isinstance(factor, Tensor) or factor != 1.0:
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)


class Pack(Protocol):
    """The parameters of one dtype and device: how their gradients become sums."""

    def fill(self) -> None:
        """Show the gradients that are here to the others."""
        ...

    def reduce(self, piggybacked: Piggybacked, loss_divisor: float) -> Piggybacked:
        """As `Reducer.reduce`."""
        ...

    def give_back(self, unused: frozenset[int]) -> None:
        """Put the sums to where the update finds them; ``unused`` parameters (ids) get None."""
        ...


class PackedGradients(Gradients):
    """Several replicas: packed into one flat tensor per dtype, reduced, and seen through views.

    An optimizer that may write into ``.grad``, as all but torch's fused ones and all with hooks,
    gets copies. ``compression``: how they are sent; None: as they are.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        collective: Collective,
        learned: Sequence[nn.Parameter] = (),
        compression: Compression | None = None,
    ) -> None:
        self._collective = collective
        self.compression = compression or Whole()
        self.absent = 0.0
        """Parameters without a gradient in the last update, counted over the replicas."""
        super().__init__(optimizer, learned)

    def _plan(self) -> None:
        self._checked = False
        packed = self.parameters
        kinds = dict.fromkeys((p.dtype, p.device) for p in packed)
        self._packs: list[Pack] = [
            self._pack([p for p in packed if (p.dtype, p.device) == kind]) for kind in kinds
        ]
        if not self._packs:
            self._bare = self._collective.reducer(0, torch.float64, torch.device("cpu"))

    def _learning(self) -> list[nn.Parameter]:
        """The parameters that learn now, of which none has a sparse gradient."""
        self.refresh()
        if not self._checked:
            refuse_sparse(self.parameters)
            self._checked = True
        return self.parameters

    def _pack(self, parameters: list[nn.Parameter]) -> Pack:
        return _Pack(parameters, self._reducer(parameters), self._optimizer)

    def _reducer(self, parameters: list[nn.Parameter]) -> Reducer:
        if not isinstance(self.compression, Whole):
            return CompressedReducer(parameters, self._collective, self.compression)
        first, numel = parameters[0], sum(parameter.numel() for parameter in parameters)
        return self._collective.reducer(numel, first.dtype, first.device)

    def before_forward(self, is_last: bool, epoch: int) -> None:
        self.epoch = self.compression.epoch = epoch

    def go_on(self, before: Gradients) -> None:
        super().go_on(before)
        self.compression.epoch = before.epoch

    def update(self, step: Callable[[], None]) -> None:
        """As `Gradients.update`; from now on what was left out is left out."""
        super().update(step)
        self._updated()

    def _updated(self) -> None:
        """Take note that an update was made of what came."""
        self.compression.updated()
        self._collective.traffic.compression_error = self.compression.error

    def clear(self) -> None:
        """As `Gradients.clear`; what was sent for no update comes once more."""
        super().clear()
        self._unsend()

    def _unsend(self) -> None:
        self.compression.undo()

    def reduce(self, piggybacked: Piggybacked = ()) -> tuple[Number, Number, Piggybacked]:
        packed = self._learning()
        # Who had no rows has no gradient either; that says nothing about the model.
        absent = sum(parameter.grad is None for parameter in packed) if self.counts else 0
        own = self._weighed
        brought = (*own.on_host, *piggybacked, float(absent), self.loss_divisor)
        for pack in self._packs:
            pack.fill()
            total = pack.reduce(brought, self.loss_divisor)
        if not self._packs:
            total = self._bare.reduce(brought, self.loss_divisor)
        if total[-1] != self.loss_divisor * self._collective.world_size:
            raise different_batches(self.loss_divisor)
        self.absent = total[-2]
        unused = self._unused(packed) if self.absent else frozenset()
        for pack in self._packs:
            pack.give_back(unused)
        weight, loss = own.total(total)
        if isnan(total[0]):  # the device knows it, or nobody does
            scale_gradients(packed, quotient(self.loss_divisor, weight))
        return weight, loss, total[2:-2]

    @property
    def _weighed(self) -> Weighed:
        """What this replica has for the next update."""
        weight = float(self._collective.rank == 0) if self.normalized else self.weight
        return Weighed(self._collective, weight, self.loss)

    def accumulated(self) -> Accumulated:
        own = super().accumulated()
        used = torch.tensor([float(grad is not None) for grad in own.grads])
        self._collective.all_reduce(used)
        grads: list[Tensor | None] = []
        for parameter, grad, count in zip(self.parameters, own.grads, used.tolist(), strict=True):
            if count:
                shown = torch.zeros_like(parameter.detach()) if grad is None else grad
                grad = self._collective.all_reduce(shown)
            grads.append(grad)
        sums = torch.tensor([own.weight, own.loss], dtype=torch.float64)
        weight, loss = self._collective.all_reduce(sums).tolist()
        return Accumulated(grads, own.loss_divisor, weight, loss)

    def _unused(self, packed: Sequence[nn.Parameter]) -> frozenset[int]:
        """The parameters (by id) that no replica has a gradient for: they keep None."""
        used = torch.tensor([float(parameter.grad is not None) for parameter in packed])
        self._collective.all_reduce(used)
        return frozenset(
            id(parameter)
            for parameter, count in zip(packed, used.tolist(), strict=True)
            if not count
        )


@dataclass(frozen=True, slots=True)
class Weighed:
    """What a replica brings to an update: how much it weighs, and the sum of its losses.

    Where the group works on a device, what that alone knows is summed there, and not waited for.

    Attributes:
        group: The replicas.
        weight: Of this one.
        loss: Of this one.
    """

    group: Collective
    weight: Number
    loss: Number

    @property
    def on_host(self) -> tuple[float, float]:
        """What rides along in the host's memory; NaN is a number that only the device knows."""
        if works_there(self.group) is None:
            return float(self.weight), float(self.loss)
        return unless_there(self.weight), unless_there(self.loss)

    def total(self, came: Piggybacked) -> tuple[Number, Number]:
        """Both over all replicas, which have met; all of them call this.

        Args:
            came: What the sum of `on_host` is, and more behind it.

        Returns:
            Weight and loss; a tensor only where it is one on any replica.
        """
        if (group := works_there(self.group)) is None:
            return came[0], came[1]
        weight, loss = group.sums((self.weight, self.loss), came)
        return weight, loss


def different_batches(loss_divisor: float) -> UserError:
    """The error for replicas that update after batches of different sizes."""
    return UserError(
        f"an update of batches of {loss_divisor:g} examples here, of another number elsewhere",
        "Call backward() on every replica for every batch, also for one without rows.",
    )


class _Pack:
    """The parameters of one dtype and device in a flat tensor."""

    def __init__(
        self, parameters: list[nn.Parameter], reducer: Reducer, optimizer: Optimizer
    ) -> None:
        self.parameters = parameters
        self.reduce = reducer.reduce
        self._inputs = views(reducer.input, parameters)
        self._outputs = views(reducer.output, parameters)
        self._optimizer = optimizer

    def fill(self) -> None:
        grads: list[Tensor] = []
        views: list[Tensor] = []
        for parameter, view in zip(self.parameters, self._inputs, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                grads.append(parameter.grad)
                views.append(view)
        if grads:
            torch._foreach_copy_(views, grads)

    def give_back(self, unused: frozenset[int]) -> None:
        is_private = writes_gradients(self._optimizer)
        for parameter, output in zip(self.parameters, self._outputs, strict=True):
            shown = output.clone() if is_private else output
            parameter.grad = None if id(parameter) in unused else shown


def writes_gradients(optimizer: Optimizer) -> bool:
    """Whether a step may write into ``.grad``: torch's fused ones do not, hooks of a user's may."""
    return not (all(group.get("fused") for group in optimizer.param_groups) and is_bare(optimizer))


def views(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Parts of ``flat`` shaped and laid out as ``parameters``, so that copies run straight."""
    views, offset = [], 0
    for parameter in parameters:
        part = flat[offset : offset + parameter.numel()]
        dense = torch.empty_like(parameter, memory_format=torch.preserve_format)
        views.append(shaped(part, dense))
        offset += parameter.numel()
    return views


def reduced(gradients: Gradients, piggybacked: Piggybacked) -> tuple[Number, Number, Piggybacked]:
    """What ``gradients.reduce`` returns; a sparse gradient is refused in words.

    Where they are means already nothing divides them, and what they weigh rides along: groups that
    meet count by it. Each step would pay for a look at all of them: the operations on dense ones
    refuse it. Where this task still waited, another one has found out first, and left.
    """
    try:
        if not gradients.normalized:
            return gradients.reduce(piggybacked)
        brought = (float(gradients.weight), *piggybacked)
        _, loss, came = gradients.reduce(brought)
        return came[0], loss, came[1:]
    except (RuntimeError, TaskLostError):
        refuse_sparse(gradients.parameters)
        raise


def refuse_sparse(parameters: Sequence[nn.Parameter]) -> None:
    """Raise `UserError` for a gradient that is no dense tensor."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise UserError(
                f"a sparse gradient of shape {tuple(parameter.shape)}",
                "Gradients are summed as dense tensors: build the Embedding with sparse=False.",
            )
