"""Attention, cut by batch or by heads."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from spartito.mesh.plan import NOTHING, order, run
from spartito.mesh.sharded import rule


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
    letters = [f"{batch}le", f"{batch}se", f"{batch}sv"]
    if attn_mask is None:
        names = ""
    else:
        wide = [*query.shape[:-1], key.shape[-2]]
        own = f"{batch}ls"[query.dim() - attn_mask.dim() :]
        sizes = wide[query.dim() - attn_mask.dim() :]
        names = "".join(
            n if s == w else NOTHING for n, s, w in zip(own, attn_mask.shape, sizes, strict=True)
        )
    return run(
        lambda q, k, v, m: F.scaled_dot_product_attention(
            q, k, v, m, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        ),
        [query, key, value, attn_mask], [*letters, names], f"{batch}lv", "lsev",
    )  # fmt: skip
