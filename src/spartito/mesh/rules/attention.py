"""Attention, cut by batch or by heads."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spartito.mesh.operand_plan import NOTHING, axes_of, finished, moved, order, plan, spec_of
from spartito.mesh.rules.elementwise import broadcast
from spartito.mesh.rules.randoms import dropout_mask
from spartito.mesh.sharded_tensor import Sharded, rule


@rule(F.scaled_dot_product_attention)
def _attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    batch = order(query.dim() - 2, "lsev")
    if enable_gqa and query.dim() > 2 and key.shape[-3] != query.shape[-3]:
        key, value = _as_many_heads(query, key, value)
        enable_gqa = key.shape[-3] != query.shape[-3]
    wide = torch.Size([*query.shape[:-1], key.shape[-2]])
    letters = (
        _broadcast(query.shape, batch, "le", enable_gqa, query.shape),
        _broadcast(key.shape, batch, "se", enable_gqa, query.shape),
        _broadcast(value.shape, batch, "sv", enable_gqa, query.shape),
        "" if attn_mask is None else broadcast(attn_mask.shape, wide, f"{batch}ls"),
    )
    operands = [query, key, value, attn_mask]
    decided = plan(tuple(map(spec_of, operands)), letters, f"{batch}lv", "lsev")
    axes = axes_of(*operands)
    q, k, v, mask = moved(operands, decided, axes)
    if not dropout_p:
        result = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return finished(result, decided, axes)
    shape = query.shape[:-2]
    if enable_gqa:
        times = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(times, -3), v.repeat_interleave(times, -3)
    else:
        shape = torch.broadcast_shapes(shape, key.shape[:-2])
    weights = _weights(q, k, mask, is_causal, scale)
    cut = {name: (axis, blocks) for name, axis, blocks in decided.cut}

    def own(drawn: Tensor) -> Tensor:
        for dim, name in enumerate(batch):
            if name in cut:
                axis, blocks = cut[name]
                drawn = axes[axis].view(drawn, dim, blocks)
        return drawn

    weights = weights * dropout_mask([*shape, *wide[-2:]], dropout_p, weights, own)
    return finished(weights @ v, decided, axes)


def _as_many_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of groups; one for each head where the groups cannot be cut as the heads."""
    cut = query.spec.dims[-3] if isinstance(query, Sharded) else None
    for other in (key, value):
        cut = cut or (other.spec.dims[-3] if isinstance(other, Sharded) else None)
    if cut is None:
        return key, value
    size = axes_of(query, key, value)[cut].size
    blocks = any(isinstance(each, Sharded) and each.spec.blocks for each in (query, key, value))
    if key.shape[-3] % size == 0 and not blocks:
        return key, value
    times = query.shape[-3] // key.shape[-3]
    return key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)


def _broadcast(own: torch.Size, batch: str, rest: str, groups: bool, query: torch.Size) -> str:
    names = batch[len(batch) - (len(own) - 2) :]
    sizes = query[len(query) - len(own) : -2]
    repeated = [
        size == 1 and whole != 1 and not (groups and n == len(names) - 1)
        for n, (size, whole) in enumerate(zip(own[:-2], sizes, strict=True))
    ]
    return "".join(NOTHING if r else n for n, r in zip(names, repeated, strict=True)) + rest


def _weights(
    q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """What each position attends to, as `F.scaled_dot_product_attention` defines it."""
    scores = (q @ k.mT) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill_(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1)
