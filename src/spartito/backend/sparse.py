"""The sum of sparse tensors, as `nn.Embedding(sparse=True)` has them for gradients.

Ranks have different indices, so all gather all indices and values, and add them up in rank order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spartito.backend.errors import DifferentCallsError
from spartito.backend.operations import Operations
from spartito.collectives.rows import check_device, row_of
from spartito.errors import RefusedCallError


def sum_sparse(operations: Operations, tensor: Tensor, size: int, reduction: str) -> None:
    """Replace a sparse COO tensor by the reduction over ``size`` ranks, in place."""
    check_device(tensor)
    if reduction not in ("SUM", "AVG"):
        raise RefusedCallError(f"{reduction} of sparse tensors", "Take SUM or AVG, or to_dense().")
    with torch.no_grad():
        own = tensor.detach().coalesce()
        layout = torch.tensor([own._nnz(), hash((own.sparse_dim(), tuple(own.shape)))])
        layouts = _gathered(operations, layout, [2] * size)
        if len({int(kind) for _, kind in layouts}) > 1:
            raise DifferentCallsError(
                f"all_reduce of sparse tensors: this rank's has the shape {tuple(own.shape)}, with "
                f"{own.sparse_dim()} sparse dimensions, another rank's has others",
                "All ranks give tensors of the same shape.",
            )
        counts = [int(count) for count, _ in layouts]
        dims, shape = own.sparse_dim(), own.values().shape[1:]
        indices = _gathered(operations, own.indices().t(), [count * dims for count in counts])
        values = _gathered(operations, own.values(), [count * shape.numel() for count in counts])
        parts = [
            torch.sparse_coo_tensor(
                index.view(count, dims).t(),
                value.view(count, *shape),
                own.shape,
                check_invariants=False,
            )
            for index, value, count in zip(indices, values, counts, strict=True)
        ]
        total = sum(parts[1:], start=parts[0]).coalesce()
        tensor.copy_(total.div_(size) if reduction == "AVG" else total)


def _gathered(operations: Operations, tensor: Tensor, counts: list[int]) -> list[Tensor]:
    """The flat tensor of each rank, of so many elements."""
    most = max(counts)
    own = tensor.new_zeros(most)
    own[: tensor.numel()] = tensor.reshape(-1)
    everyone = own.new_empty((len(counts), most))
    operations.all_gather(row_of(own), [row_of(part) for part in everyone])
    return [part[:count] for part, count in zip(everyone, counts, strict=True)]
