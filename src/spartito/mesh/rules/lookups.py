"""Embeddings, cut by rows of the table or by its columns."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spartito.errors import UserError
from spartito.mesh.operand_plan import Plan, order, run, summed
from spartito.mesh.rules.whole import compute_whole
from spartito.mesh.sharded_tensor import Sharded, rule
from spartito.mesh.spec import spec


@rule(F.embedding, torch.embedding)
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
    if func is not F.embedding:  # torch.embedding(weight, indices, ...)
        return compute_whole(func, (input, weight), {})
    if max_norm is not None:
        raise UserError(
            f"max_norm={max_norm} of an embedding that is cut: it changes rows in place",
            "Replicate its weight (names={path: ()}), or leave max_norm out.",
        )
    padding = padding_idx
    if padding is not None and padding < 0:
        padding += weight.shape[0]
    plain = not isinstance(input, Sharded) and not scale_grad_by_freq and not sparse
    if plain and isinstance(weight, Sharded) and weight.spec.dims[0] and not weight.spec.blocks:
        return _of_rows(input, weight, padding)
    batch = order(input.dim(), "vh")
    return run(
        lambda at, table: F.embedding(at, table, padding, None, 2.0, scale_grad_by_freq, sparse),
        [input, weight], [batch, "vh"], f"{batch}h", "v", (1, 0),
    )  # fmt: skip


def _of_rows(at: Tensor, table: Sharded, padding: int | None) -> Tensor:
    """Each task looks up the rows that it has, the others are 0; their sum is all of them."""
    if at.numel() and not at.is_meta and not bool(((at >= 0) & (at < table.shape[0])).all()):
        raise IndexError("index out of range in self")
    axis = table.axes[str(table.spec.dims[0])]
    rows = table.local.shape[0]
    own = at - axis.index * rows
    here = (own >= 0) & (own < rows)
    mine = None if padding is None else padding - axis.index * rows
    if mine is not None and not 0 <= mine < rows:
        mine = None
    found = F.embedding(torch.where(here, own, 0), table.local, mine)
    found = torch.where(here.unsqueeze(-1), found, 0)
    out = spec((*[None] * at.dim(), table.spec.dims[1]))
    return summed(found, Plan((), out, (axis.name,), ()), table.axes)
