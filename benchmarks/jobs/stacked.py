"""Eight replicas of `benchmarks.jobs.replicated` as one computation: their weights side by side.

Row ``r`` of one tensor is all that replica ``r`` has, so an operation is one for all of them. What
each computes is what its process would: its rows of the same global batches, its own gradients,
clipping and AdamW. A meeting is the mean difference from the last common weights, and our outer
optimizer. One group is synchronous training.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spartito as sp
from benchmarks.common import flush_denormals
from benchmarks.jobs.replicated import CONTEXT, RATE, WARM
from spartito.outer.optimizer import choose, make_outer

HEADS, WIDTH, CLIP = 2, 32, 1.0
VALIDATING = 512


@dataclass(frozen=True, slots=True)
class Side:
    """A training: how many groups, how often they meet (0: never), and what makes an update.

    Attributes:
        groups: Of the same global batch each has a part.
        every: Updates between meetings.
        outer: As that of `LocalSGDStrategy`.
    """

    groups: int
    every: int
    outer: str | None


class Replicas:
    """Copies of one GPT, of which each learns from its own rows.

    Args:
        count: How many.
        weights: What all begin from: a `sp.models.GPT`'s state.
    """

    def __init__(self, count: int, weights: Mapping[str, Tensor]) -> None:
        named = {name: value for name, value in weights.items() if name != "head.weight"}
        start = torch.cat([value.flatten() for value in named.values()])
        self.flat = nn.Parameter(start.repeat(count, 1))
        self.flat.grad = torch.zeros_like(self.flat)
        self._names = {name: value.shape for name, value in named.items()}
        self.parts: dict[str, Tensor] = {}
        values, grads = self.flat.detach(), self.flat.grad
        at = 0
        for name, shape in self._names.items():
            end = at + shape.numel()
            part = values[:, at:end].view(count, *shape).requires_grad_()
            part.grad = grads[:, at:end].view(count, *shape)
            self.parts[name], at = part, end

    def state(self) -> dict[str, Tensor]:
        """The weights of the first one, for a `sp.models.GPT`."""
        own = {name: part[0].detach().clone() for name, part in self.parts.items()}
        return {**own, "head.weight": own["embedding.weight"]}

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """The sum of the mean losses of all, each of its own of ``(replicas, rows, tokens)``."""
        count, rows, tokens = x.shape
        p = self.parts
        embedding = p["embedding.weight"]
        vocabulary = embedding.shape[1]
        at = x + torch.arange(count)[:, None, None] * vocabulary
        seen = F.embedding(at, embedding.reshape(-1, WIDTH))
        x = (seen + p["positions.weight"][:, None, :tokens]).view(count, -1, WIDTH)
        x = x + self._attention(self._norm(x, "blocks.0.attention_norm"), rows, tokens)
        up = self._linear(self._norm(x, "blocks.0.mlp_norm"), "blocks.0.up")
        x = x + self._linear(F.gelu(up), "blocks.0.down")
        logits = torch.bmm(self._norm(x, "norm"), embedding.transpose(1, 2))
        return F.cross_entropy(logits.view(-1, vocabulary), y.flatten()) * count

    def _attention(self, x: Tensor, rows: int, tokens: int) -> Tensor:
        count, name = len(x), "blocks.0.attention"
        parts = [self._linear(x, f"{name}.{one}") for one in ("query", "key", "value")]
        shape = (count * rows, tokens, HEADS, WIDTH // HEADS)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._linear(mixed.transpose(1, 2).reshape(count, -1, WIDTH), f"{name}.out")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.parts[f"{name}.weight"], self.parts[f"{name}.bias"]
        return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.parts[f"{name}.weight"], self.parts[f"{name}.bias"]
        return torch.addcmul(bias[:, None], F.layer_norm(x, (WIDTH,)), weight[:, None])


def begin(before: int, batch: int, world: int, seed: int) -> dict[str, Tensor]:
    """The weights from which all sides go on: of so many synchronous updates.

    Args:
        before: Their number.
        batch: Examples of each worker.
        world: How many workers.
        seed: Of weights and data.
    """
    torch.manual_seed(seed)
    net = sp.models.GPT(len(_text("training").classes), CONTEXT, 1, HEADS, WIDTH, 0.0)
    side = Side(1, 0, None)
    found = train(side, dict(net.state_dict()), before, before, batch * world, seed)
    return dict(found["weights"])


def train(
    side: Side, weights: Mapping[str, Tensor], updates: int, look: int, batch: int, seed: int
) -> dict[str, Any]:
    """Train one side in this process.

    Args:
        side: What it is.
        weights: What it begins from.
        updates: How many.
        look: Updates between evaluations, after a meeting.
        batch: Examples of a global batch.
        seed: Of the data.

    Returns:
        The weights at the end, the losses on the validation text, and the number of meetings.
    """
    torch.set_num_threads(1)
    flush_denormals()
    warnings.filterwarnings("ignore", message="grad and param do not obey")  # rows of one tensor
    here = Replicas(side.groups, weights)
    flat = here.flat
    assert flat.grad is not None
    inner = torch.optim.AdamW([flat], lr=RATE, betas=(0.9, 0.99), fused=True)
    start = nn.Parameter(flat.detach()[0].clone())
    outer = make_outer(choose(side.outer), [start])
    text = _text("training").shuffle().batch(batch, drop_remainder=True).repeat()
    batches = _batches(text, seed)
    losses: list[float] = []
    meetings = 0
    for step in range(updates):
        x, y = (each.view(side.groups, -1, CONTEXT) for each in next(batches))
        flat.grad.zero_()
        here.losses(x, y).backward()
        norms = torch.linalg.vector_norm(flat.grad, dim=1, keepdim=True)
        flat.grad.mul_((CLIP / (norms + 1e-6)).clamp_(max=1))
        inner.param_groups[0]["lr"] = RATE * _rate(step, updates)
        inner.step()
        if side.every and (step + 1) % side.every == 0:
            meetings += 1
            start.grad = start.detach() - flat.detach().mean(0)
            outer.step()
            flat.detach().copy_(start.detach())
        if (step + 1) % look == 0:
            losses.append(_validate(here.state()))
    return {"weights": here.state(), "losses": losses, "meetings": meetings or updates}


def _rate(step: int, updates: int) -> float:
    """As in `benchmarks.jobs.replicated`."""
    slow = min(1, (step + 1) / WARM)
    return slow * (0.55 + 0.45 * math.cos(math.pi * min(1, step / updates)))


def _text(subset: Any) -> sp.data.Dataset:
    return sp.data.characters(subset=subset, context=CONTEXT)


def _batches(text: sp.data.Dataset, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Global batches, in the order in which a trainer of this seed has them."""
    for batch in sp.OneDeviceStrategy().distribute(text, seed=seed):
        yield batch.x, batch.y


@torch.no_grad()
def _validate(weights: Mapping[str, Tensor]) -> float:
    """The loss on the validation text."""
    one, total, rows = Replicas(1, weights), 0.0, 0
    text = _text("validation").batch(VALIDATING)
    for batch in sp.OneDeviceStrategy().distribute(text, training=False):
        x, y = batch.x, batch.y
        total += float(one.losses(x[None], y[None])) * len(x)
        rows += len(x)
    return total / rows
