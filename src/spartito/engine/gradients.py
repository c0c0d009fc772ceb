"""Gradients of one optimizer's parameters, summed over the replicas and weighted exactly.

Every backward pass adds ``sum of local losses / unit`` to the gradients, where the unit is the
size of the global batch as planned. What is left is the factor unit / (weight that came),
which is 1 unless examples were missing, losses weigh otherwise, or batches are accumulated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spartito.collectives.collective import Collective, Reducer, Riders
from spartito.errors import UserError


class Gradients(ABC):
    """What waits for the next update of one optimizer."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._given = list(parameters)
        self._choose()
        self.replicas = 1.0  # what a backward pass divides by on its own
        self.unit = 0.0
        self.weight = 0.0
        self.loss = 0.0

    def begin(self, unit: float) -> float:
        """Before a backward pass over a batch planned as ``unit`` examples; answers the unit.

        The unit stays that of the first batch until `clear`. Gradients that the user dropped
        (``optimizer.zero_grad()``) take their weight along.
        """
        if self._frozen and any(parameter.requires_grad for parameter in self._frozen):
            self._choose()
        if self.unit and all(parameter.grad is None for parameter in self.parameters):
            self.clear()
        self.unit = self.unit or unit
        return self.unit

    def _choose(self) -> None:
        """Take the parameters that learn; called again when users unfreeze some."""
        self.parameters = [p for p in self._given if p.requires_grad]
        self._frozen = [p for p in self._given if not p.requires_grad]

    def add(self, loss: float, weight: float) -> None:
        """After it: the sum of the local losses, and how much they weigh."""
        self.loss += loss
        self.weight += weight

    @abstractmethod
    def reduce(self, riders: Riders = ()) -> Riders:
        """Make every ``.grad`` the weighted mean over all replicas.

        Answers the sums over the replicas of (weight, loss, *riders).
        """

    def clear(self) -> None:
        """Forget it all, after the update."""
        self.unit = self.weight = self.loss = 0.0
        for parameter in self.parameters:
            parameter.grad = None

    def clip(self, norm: float) -> None:
        """Scale the reduced gradients so that their global L2 norm is at most ``norm``."""
        present = [p for p in self.parameters if p.grad is not None]
        grads = [p.grad for p in present if p.grad is not None]
        total = torch.nn.utils.get_total_norm(grads)
        scale = torch.clamp(norm / (total + 1e-6), max=1.0)
        # Not in place: a reduced gradient may lie in memory that all replicas read.
        for parameter, grad in zip(present, torch._foreach_mul(grads, scale), strict=True):
            parameter.grad = grad


class LocalGradients(Gradients):
    """One replica: the gradients are where backward left them."""

    def reduce(self, riders: Riders = ()) -> Riders:
        if self.weight and self.weight != self.unit:
            scale_gradients(self.parameters, self.unit / self.weight)
        return (self.weight, self.loss, *riders)


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply the gradients that there are, in place."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor)


class PackedGradients(Gradients):
    """Several replicas: packed into one flat tensor per dtype, reduced, and seen through views.

    ``private`` copies the result out, for optimizers that may write into ``.grad``.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], collective: Collective, private: bool
    ) -> None:
        self._collective, self._private = collective, private
        super().__init__(parameters)
        self._checked = False

    def _choose(self) -> None:
        super()._choose()
        kinds = dict.fromkeys((p.dtype, p.device) for p in self.parameters)
        self._packs = [
            _Pack(
                [p for p in self.parameters if (p.dtype, p.device) == kind],
                self._collective,
                self._private,
            )
            for kind in kinds
        ]

    def reduce(self, riders: Riders = ()) -> Riders:
        if not self._checked:
            _refuse_sparse(self.parameters)
            self._checked = True
        absent = sum(parameter.grad is None for parameter in self.parameters)
        brought = (self.weight, self.loss, *riders, float(absent))
        for pack in self._packs:
            pack.fill()
            total = pack.reducer.reduce(brought, self.unit)
        unused = self._unused() if total[-1] else frozenset()
        for pack in self._packs:
            pack.give_back(unused)
        return total[:-1]

    def _unused(self) -> frozenset[int]:
        """The parameters (by id) that no replica has a gradient for: they keep None."""
        used = torch.tensor([float(parameter.grad is not None) for parameter in self.parameters])
        self._collective.all_reduce(used)
        return frozenset(
            id(parameter)
            for parameter, count in zip(self.parameters, used.tolist(), strict=True)
            if not count
        )


class _Pack:
    """The parameters of one dtype and device in a flat tensor."""

    def __init__(
        self, parameters: list[nn.Parameter], collective: Collective, private: bool
    ) -> None:
        self.parameters = parameters
        first = parameters[0]
        numel = sum(parameter.numel() for parameter in parameters)
        self.reducer: Reducer = collective.reducer(numel, first.dtype, first.device)
        self._inputs = _views(self.reducer.input, parameters)
        self._outputs = _views(self.reducer.output, parameters)
        self._private = private

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
        outputs = [view.clone() for view in self._outputs] if self._private else self._outputs
        for parameter, output in zip(self.parameters, outputs, strict=True):
            parameter.grad = None if id(parameter) in unused else output


def _views(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Parts of ``flat`` shaped and laid out as ``parameters``, so that copies run straight."""
    views, offset = [], 0
    for parameter in parameters:
        part = flat[offset : offset + parameter.numel()]
        dense = torch.empty_like(parameter, memory_format=torch.preserve_format)
        views.append(part.as_strided(dense.shape, dense.stride(), part.storage_offset()))
        offset += parameter.numel()
    return views


def _refuse_sparse(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise UserError(
                f"a sparse gradient of shape {tuple(parameter.shape)}",
                "Gradients are summed as dense tensors: build the Embedding with sparse=False.",
            )
