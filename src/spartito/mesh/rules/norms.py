"""Normalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from spartito.mesh.plan import order, run
from spartito.mesh.sharded import rule


@rule(F.layer_norm)
def _layer_norm(
    func: Any,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    return _over_last(F.layer_norm, input, normalized_shape, [weight, bias], eps)


@rule(F.rms_norm)
def _rms_norm(
    func: Any,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    return _over_last(F.rms_norm, input, normalized_shape, [weight], eps)


def _over_last(
    norm: Any, x: Tensor, shape: Sequence[int], affine: list[Tensor | None], eps: Any
) -> Tensor:
    names = order(x.dim())
    inner = names[x.dim() - len(shape) :]
    return run(
        lambda x, *affine: norm(x, tuple(shape), *affine, eps=eps),
        [x, *affine], [names, *[inner] * len(affine)], names, inner,
    )  # fmt: skip
