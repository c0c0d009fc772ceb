"""Metrics of torchmetrics in loops of the user's own."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn

import spartito as sp
from tests.strategies.jobs import make_strategy

EXAMPLES, BATCH, CLASSES = 41, 8, 4
"""So that two of three replicas have no rows of the last batch."""


def measured(name: str | None, options: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
    """All figures of an epoch, and what a metric says once the strategy is closed.

    Args:
        name: The strategy; None: plain torch.
        options: Its own.
    """
    torch.manual_seed(0)
    net = nn.Linear(4, CLASSES).double()
    x = torch.randn(EXAMPLES, 4, dtype=torch.float64)
    labels = (x[:, :CLASSES] + torch.randn(EXAMPLES, CLASSES)).argmax(1)
    metrics = torchmetrics.MetricCollection(
        [
            torchmetrics.Accuracy("multiclass", num_classes=CLASSES),
            torchmetrics.ConfusionMatrix("multiclass", num_classes=CLASSES),
            torchmetrics.AUROC("multiclass", num_classes=CLASSES),  # keeps all rows
        ]
    )
    if name is None:
        for at in range(0, EXAMPLES, BATCH):
            metrics.update(net(x[at : at + BATCH]), labels[at : at + BATCH])
        return metrics.compute(), 0.0
    strategy = make_strategy(name, **options)
    strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.0))
    seen = torchmetrics.SumMetric()
    for batch in strategy.distribute(sp.data.arrays(x, labels).batch(BATCH)):
        seen.update(batch.size)
        outputs = net(batch.x)
        if batch.size:  # torchmetrics takes no batch without rows
            metrics.update(outputs, batch.y)
    found = dict(metrics.compute())
    found["seen"] = seen.compute()
    strategy.close()
    seen.update(0)  # what was computed before is forgotten
    return found, float(seen.compute())
