"""In which precision the forward pass computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from spartito.errors import UserError
from spartito.log import warn
from spartito.names import PRECISIONS, nearest


def choose_precision(wanted: str, device: torch.device) -> str:
    """Return "fp32" (the model's own dtype) or "bf16" (autocast), as it pays on ``device``.

    On a CPU whose instructions know no bf16, torch computes it step by step: a convolutional
    network took 20 times as long as in fp32. There "bf16" becomes "fp32", with a warning.
    """
    if wanted not in PRECISIONS:
        raise UserError(f"unknown precision {wanted!r}", nearest(wanted, PRECISIONS))
    if wanted == "bf16" and device.type == "cpu" and not _cpu_knows_bf16():
        warn("this CPU has no bf16 instructions: computing in fp32, which is much faster here")
        return "fp32"
    return wanted


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Where the forward pass and the loss are computed."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def _cpu_knows_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
