"""Models, batches and loops that the programs share: plain torch, as anyone writes it.

Each program is called on every rank with a process group ready, and returns numbers to compare;
nothing in it knows which backend it runs on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

Numbers = list[float]
Program = Callable[[Path], Numbers]

WIDTH, BATCH, STEPS = 16, 8, 6


def mlp(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)]
    return nn.Sequential(*layers).to(dtype)


class Block(nn.Module):
    """A block of a GPT, written so that its linear layers can be cut."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.before(x)
        head = WIDTH // 4
        query, key, value = (
            layer(y).unflatten(-1, (-1, head)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        weights = (query @ key.transpose(-1, -2) / head**0.5).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    """Small, but all there."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.blocks(self.embedding(tokens)))


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT().double()


def batch(step: int, rank: int | None = None, dtype: torch.dtype = torch.float64) -> Any:
    """Inputs and classes of one rank; each has its own unless told."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(4, (BATCH,), generator=generator)


def tokens(step: int, rank: int | None = None) -> Any:
    rank = dist.get_rank() if rank is None else rank
    drawn = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(100 * step + rank))
    return drawn[:, :-1], drawn[:, 1:]


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def trained(model: nn.Module, optimizer: Any = None, steps: int = STEPS) -> Numbers:
    """Losses of a plain loop, and then the sums of all gradients and parameters."""
    optimizer = optimizer or adam(model)
    dtype = next(model.parameters()).dtype
    losses = []
    for step in range(steps):
        x, y = batch(step, dtype=dtype)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).double(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses + sums(model)


def sums(model: nn.Module) -> Numbers:
    """Each parameter in a number; of one that is cut, the part that lies here."""
    found = []
    for parameter in model.parameters():
        for tensor in (parameter.detach(), parameter.grad):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found.append(0.0 if local is None else local.double().sum().item())
    return found


def mesh_of(*shape: int, names: Sequence[str] = ("data",)) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(names))


def taught(model: nn.Module, rank: int | None = None) -> Numbers:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(4):
        inputs, wanted = tokens(step, rank)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), wanted.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses + sums(model)
