"""Gradients that torch's DistributedDataParallel reduces while backward still runs.

The engine for GPUs, where NCCL's traffic hides behind the computation. On CPUs it runs on gloo.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from spartito.collectives.collective import Collective, Piggybacked
from spartito.engine.gradients import PackedGradients, scale_gradients


def overlap(model: nn.Module, device: torch.device) -> nn.Module:
    """``model`` wrapped so that every backward pass averages its gradients over the replicas.

    Buffers stay each replica's own, as under every strategy; parameters may go unused.
    """
    model.register_forward_hook(_as_dict)
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        broadcast_buffers=False,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
    )


def _as_dict(model: nn.Module, given: Any, output: Any) -> Any:
    """DDP looks for what was used in tuples and dicts, not in other mappings."""
    return dict(output) if isinstance(output, Mapping) and not isinstance(output, dict) else output


class OverlappedGradients(PackedGradients):
    """Gradients that backward has reduced already; only the weights are left to agree on.

    Parameters that DDP did not see learn when it wrapped ``model`` are reduced after backward.
    """

    def __init__(self, optimizer: Optimizer, collective: Collective, model: nn.Module) -> None:
        self._wrapped = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.replicas = float(collective.world_size)  # DDP divides by it; we want the sum
        super().__init__(optimizer, collective)

    def begin(self, loss_divisor: float) -> float:
        """As `Gradients.begin`; backward begins once all replicas are about to."""
        found = super().begin(loss_divisor)
        if self.parameters and not self.parameters[0].is_cuda:
            self._collective.barrier()  # gloo would wait there for one that is at another call
        return found

    def _is_summed(self, parameter: nn.Parameter) -> bool:
        return any(parameter is wrapped for wrapped in self._wrapped)

    @property
    def _packed(self) -> list[nn.Parameter]:
        wrapped = {id(parameter) for parameter in self._wrapped}
        return [parameter for parameter in self.parameters if id(parameter) not in wrapped]

    def discarding(self) -> AbstractContextManager[None]:
        """The others' gradients come in by this pass too."""
        return nullcontext()

    def reduce(self, piggybacked: Piggybacked = ()) -> Piggybacked:
        total = super().reduce(piggybacked)
        late = self._packed
        ours = {id(parameter) for parameter in late}
        if total[0] and total[0] != self.loss_divisor:
            overlapped = [p for p in self.parameters if id(p) not in ours]
            scale_gradients(overlapped, self.loss_divisor / total[0])
        scale_gradients(late, 1 / self.replicas)
        return total
