"""In which precision the forward pass computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from spartito.collectives.collective import Collective
from spartito.engine.updates import fused_update
from spartito.engine.updates.optimizer_step import stepping
from spartito.engine.updates.optimizers import fill_momentum, is_fused
from spartito.errors import UserError
from spartito.names import PRECISIONS, nearest
from spartito.notes import warn

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_precision(wanted: str, device: torch.device, computes: bool = True) -> str:
    """Return "fp32" (the model's own dtype), "bf16", "bf16-true" or "fp16" for ``wanted``.

    Lightning's names mean the same. On a CPU whose instructions know no bf16, torch computes it
    step by step: a convolutional network took 20 times as long as in fp32. There "bf16" becomes
    "fp32", with a warning, unless this task computes nothing.
    """
    if not isinstance(wanted, str) or wanted not in PRECISIONS:
        raise UserError(f"unknown precision {wanted!r}", nearest(wanted, PRECISIONS))
    chosen = PRECISIONS[wanted]
    if computes and chosen == "bf16" and device.type == "cpu" and not _cpu_knows_bf16():
        warn("this CPU has no bf16 instructions: computing in fp32, which is much faster here")
        return "fp32"
    return chosen


def convert(model: nn.Module, precision: str) -> None:
    """Give ``model`` the dtype of its parameters where ``precision`` is about that."""
    if precision == "bf16-true":
        model.to(torch.bfloat16)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Where the forward pass and the loss are computed."""
    if precision not in _AUTOCAST:
        return nullcontext()
    return torch.autocast(device.type, _AUTOCAST[precision])


class LossScale:
    """Scales the loss so that gradients do not vanish in fp16; here, in full precision, not at all.

    Micikevicius et al., "Mixed Precision Training" (2018).
    """

    value = 1.0

    def __init__(self) -> None:
        self._stepper = fused_update.Stepper()

    def scale(self, gradient: Tensor) -> Tensor:
        """What a backward pass begins with."""
        return gradient

    def unscale(self, optimizer: Optimizer, parts: Collective) -> None:
        """Bring back the reduced gradients; ``parts`` are the tasks that share one model."""

    def step(self, optimizer: Optimizer) -> None:
        """Let the optimizer step, unless gradients have overflowed."""
        self._stepper.step(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""


class ReducedScaler(GradScaler):
    """A scaler of gradients that are reduced, so that all replicas find the same in them."""


class DynamicLossScale(LossScale):
    """As large as gradients allow, by torch's scaler: an update that overflows is left out."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._scaler = ReducedScaler(device.type)
        self._is_unscaled = False

    @property
    def value(self) -> float:  # type: ignore[override]
        """By which the gradients that wait are too large."""
        return self._scaler.get_scale()

    def scale(self, gradient: Tensor) -> Tensor:
        return self._scaler.scale(gradient)

    def unscale(self, optimizer: Optimizer, parts: Collective) -> None:
        self._is_unscaled = False
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:  # it may lie in memory that all replicas read
                    parameter.grad = parameter.grad.clone()
                    self._is_unscaled = True
        if self._is_unscaled:
            self._scaler.unscale_(optimizer)
            if parts.world_size > 1:  # what overflows on one task is left out on all
                state = self._scaler._per_optimizer_states[id(optimizer)]
                for found in state["found_inf_per_device"].values():
                    parts.all_reduce(found).clamp_(max=1.0)  # torch's kernels look for 1

    def step(self, optimizer: Optimizer) -> None:
        if self._is_unscaled:
            if is_fused(optimizer):
                fill_momentum(optimizer, all_fresh=True)
                optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
            with stepping(optimizer):
                self._scaler.step(optimizer)
            self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state)


def make_loss_scale(precision: str, device: torch.device) -> LossScale:
    """The loss scale that ``precision`` needs."""
    return DynamicLossScale(device) if precision == "fp16" else LossScale()


def _cpu_knows_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
