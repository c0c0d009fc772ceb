"""Loops with a gradient scaler of their own, under strategies and in plain torch."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spartito as sp
from spartito.errors import SpartitoError
from tests.strategies.jobs import make_strategy

EXAMPLES, BATCH, CLIP = 50, 8, 0.5
"""So that the last batch leaves one of three replicas without rows."""


def made(fused: bool) -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    x = torch.randn(EXAMPLES, 8, dtype=torch.float64)
    return net, torch.optim.AdamW(net.parameters(), 0.01, fused=fused), x, x[:, :3].argmax(1)


def factors(step: int) -> Tensor:
    """What losses are multiplied by: one of the third batch's overflows."""
    found = torch.ones(BATCH, dtype=torch.float64)
    found[-1] = float("inf") if step == 2 else 1.0
    return found


def plain(fused: bool) -> dict[str, Tensor]:
    return loop(*made(fused))


def loop(
    net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> dict[str, Tensor]:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)
    for _ in range(2):
        for step, at in enumerate(range(0, EXAMPLES, BATCH)):
            optimizer.zero_grad()
            rows = slice(at, at + BATCH)
            losses = F.cross_entropy(net(x[rows]), y[rows], reduction="none")
            scaler.scale((losses * factors(step)[: len(losses)]).mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
    return net.state_dict() | {"scale": torch.tensor(scaler.get_scale())}


def scaled(
    name: str, options: dict[str, Any], unscales: bool, fused: bool
) -> dict[str, Tensor] | str:
    """What was learned, with the scale; or the error."""
    strategy = make_strategy(name, **options)
    net, optimizer, x, y = made(fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)
    strategy.prepare(net, optimizer, clip_norm=CLIP)
    try:
        for _ in range(2):
            for batch in strategy.distribute(sp.data.arrays(x, y).batch(BATCH)):
                optimizer.zero_grad()
                losses = F.cross_entropy(net(batch.x), batch.y, reduction="none")
                losses = losses * factors(batch.step)[batch.offsets]
                strategy.backward(scaler.scale(losses), batch)
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
        found: dict[str, Tensor] = strategy.state_dict()["model"]
        return found | {"scale": torch.tensor(scaler.get_scale())}
    except SpartitoError as error:
        return str(error)
    finally:
        strategy.close()


def scaled_later(closes: bool) -> dict[str, Tensor]:
    """What a plain loop learns with a model whose strategy is closed, or gone."""
    net, optimizer, x, y = made(False)
    strategy = make_strategy("mirrored")
    strategy.prepare(net, optimizer)
    if closes:
        strategy.close()
    del strategy
    gc.collect()
    return loop(net, optimizer, x, y)
