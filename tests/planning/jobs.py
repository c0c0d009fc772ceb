"""What replicas run, so that what they send is counted."""

from __future__ import annotations

import torch
from torch import nn

import spartito as sp
from spartito.collectives.hierarchical import HierarchicalCollective
from tests.replicas import warns

STEPS = 4


@warns("every=", "compress=")
def sent(text: str, width: int, per_machine: int) -> tuple[int, int]:
    """Bytes of the gradients, and what this task sends between machines for each update."""
    strategy = sp.strategy(text, timeout=20)
    rendezvous = strategy.engine.groups._rendezvous
    rendezvous._host = f"machine {strategy.task.index // per_machine}"
    torch.manual_seed(1)
    net = nn.Linear(width, 8)
    strategy.prepare(net, lambda parameters: torch.optim.Adam(parameters))
    x, y = torch.randn(8 * STEPS, width), torch.randint(8, (8 * STEPS,))
    counts = []
    group = strategy.engine.team.replicas
    between = group.between if isinstance(group, HierarchicalCollective) else group
    for batch in strategy.distribute(sp.data.arrays(x, y).batch(8)):
        strategy.step(batch, nn.CrossEntropyLoss())
        counts.append(between.traffic.sent)
    nbytes = sum(p.numel() * p.itemsize for p in net.parameters())
    strategy.close()
    return nbytes, counts[-1] - counts[-2]
