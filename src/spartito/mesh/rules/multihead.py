"""`nn.MultiheadAttention`, cut by heads."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spartito.mesh.rules.whole import compute_whole
from spartito.mesh.sharded_tensor import rule, whole

_functional: Any = F


@rule(F.multi_head_attention_forward)
def _multi_head_attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    rare = (bias_k, bias_v, static_k, static_v)
    if add_zero_attn or any(each is not None for each in rare) or query.dim() == 2:
        given = (
            query, key, value, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k,
            bias_v, add_zero_attn, dropout_p, out_proj_weight, out_proj_bias, training,
            key_padding_mask, need_weights, attn_mask, use_separate_proj_weight, q_proj_weight,
            k_proj_weight, v_proj_weight, static_k, static_v, average_attn_weights, is_causal,
        )  # fmt: skip
        return compute_whole(func, given, {})
    weights: Any = [q_proj_weight, k_proj_weight, v_proj_weight]
    if not use_separate_proj_weight:
        weights = [in_proj_weight]
    q, k, v = (
        each.view(each.shape[0], each.shape[1], num_heads, -1).permute(1, 2, 0, 3)
        for each in _projected((query, key, value), weights, in_proj_bias)
    )
    batch, _, length, size = q.shape
    mask, causal = _mask(attn_mask, key_padding_mask, q, k.shape[-2], is_causal, need_weights)
    drop = dropout_p if training else 0.0
    if need_weights:
        scores = (q * math.sqrt(1.0 / size)) @ k.mT
        attended = torch.softmax(scores if mask is None else scores + mask, -1)
        attended = F.dropout(attended, drop) if drop else attended
        output = attended @ v
    else:
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=drop, is_causal=causal
        )
    output = output.permute(2, 0, 1, 3).reshape(length, batch, num_heads * size)
    output = F.linear(output, out_proj_weight, out_proj_bias)
    if not need_weights:
        return output, None
    return output, whole(attended.mean(1) if average_attn_weights else attended)


def _projected(
    inputs: tuple[Tensor, Tensor, Tensor], weights: list[Tensor], bias: Tensor | None
) -> list[Tensor]:
    query, key, value = inputs
    if len(weights) == 1 and query is key is value:
        return list(F.linear(query, weights[0], bias).chunk(3, -1))
    if len(weights) == 1:
        weights = list(weights[0].chunk(3))
    biases: Any = [None] * 3 if bias is None else bias.chunk(3)
    return [F.linear(*each) for each in zip(inputs, weights, biases, strict=True)]


def _mask(
    given: Tensor | None,
    padding: Tensor | None,
    query: Tensor,
    length: int,
    is_causal: bool,
    need_weights: bool,
) -> tuple[Tensor | None, bool]:
    """What is added to the scores, (batch, heads, length, length of the keys) or broadcast."""
    if is_causal and given is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    if is_causal and padding is None and not need_weights:
        return None, True
    batch, heads = query.shape[:2]
    mask = _added(given, query.dtype)
    if mask is not None and mask.dim() == 3 and mask.shape[0] != 1:
        mask = mask.view(batch, heads, *mask.shape[1:])
    if padding is None:
        return mask, False
    spread = whole(_added(padding, query.dtype)).view(batch, 1, 1, length)  # type: ignore[arg-type]
    return (spread if mask is None else mask + spread), False


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as what is added: -inf where it is True."""
    found: Tensor | None = _functional._canonical_mask(
        mask=mask, mask_name="mask", other_type=None, other_name="", target_type=dtype,
        check_other=False,
    )  # fmt: skip
    return found
