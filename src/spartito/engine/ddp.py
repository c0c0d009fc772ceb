"""Gradients that torch's DistributedDataParallel reduces while backward still runs.

The engine for GPUs, where NCCL's traffic hides behind the computation. On CPUs it runs on gloo.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spartito.collectives.collective import Collective, Riders
from spartito.engine.gradients import Gradients, scale_gradients
from spartito.errors import UserError


def overlap(model: nn.Module, device: torch.device) -> nn.Module:
    """``model`` wrapped so that every backward pass averages its gradients over the replicas.

    Buffers stay each replica's own, as under every strategy; parameters may go unused.
    """
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        broadcast_buffers=False,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
    )


class OverlappedGradients(Gradients):
    """Gradients that backward has reduced already; only the weights are left to agree on."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], collective: Collective, device: torch.device
    ) -> None:
        self._wrapped = False
        super().__init__(parameters)
        self._wrapped = True
        self._collective, self._device = collective, device
        self.replicas = float(collective.world_size)  # DDP divides by it; we want the sum

    def _choose(self) -> None:
        if self._wrapped:
            raise UserError(
                "parameters that were frozen when DDP wrapped the model learn now",
                "Unfreeze them before the Trainer is made, or make a new one.",
            )
        super()._choose()

    def reduce(self, riders: Riders = ()) -> Riders:
        brought = torch.tensor(
            (self.weight, self.loss, *riders), dtype=torch.float64, device=self._device
        )
        total = tuple(self._collective.all_reduce(brought).tolist())
        if total[0] and total[0] != self.unit:
            scale_gradients(self.parameters, self.unit / total[0])
        return total
