"""Embeddings."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from spartito.mesh.plan import order, run
from spartito.mesh.rules.whole import compute_whole
from spartito.mesh.sharded import rule


@rule(F.embedding)
def _embedding(
    func: Any,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None:
        return compute_whole(
            func, (input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse), {}
        )
    batch = order(input.dim(), "vh")
    return run(
        lambda at, table: F.embedding(
            at, table, padding_idx, None, 2.0, scale_grad_by_freq, sparse
        ),
        [input, weight], [batch, "vh"], f"{batch}h", "v", (1, 0),
    )  # fmt: skip
