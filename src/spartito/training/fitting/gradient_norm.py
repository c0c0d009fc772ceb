"""The norm of gradients as a figure of a training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from spartito.errors import UserError
from spartito.strategies import Strategy
from spartito.training.metrics.names import GRADIENT_NORM


def report_norm(strategy: Strategy, optimizer: Optimizer, metrics: Any) -> None:
    """Have updates tell the norm of their gradients, if it is among the metrics.

    Args:
        strategy: Under which they are made.
        optimizer: That makes them.
        metrics: What the user asked for.

    Raises:
        UserError: Nobody has the gradients of an update.
    """
    asked = [metrics] if isinstance(metrics, str) else metrics
    # Metrics of torchmetrics are equal to anything, in their way.
    names = [each for each in asked if isinstance(each, str)] if isinstance(asked, Sequence) else []
    if GRADIENT_NORM not in names:
        return
    if strategy.engine.cluster.addresses.get("ps"):
        raise UserError(
            f"the metric {GRADIENT_NORM!r} under {strategy}, whose servers make the updates",
            "Leave it out, or choose another strategy.",
        )
    strategy.engine.team.pairs.of(optimizer).reports_norm = True
