"""Linear layers and products of matrices."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spartito.mesh.plan import NOTHING, axes_of, finished, moved, order, plan, run, spec_of
from spartito.mesh.sharded import rule


@rule(F.linear, torch._C._nn.linear)
def _linear(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    batch = order(input.dim() - 1, "io")
    letters = [f"{batch}i", "oi"[2 - weight.dim() :] if weight.dim() == 2 else "i"]
    out = f"{batch}o" if weight.dim() == 2 else batch
    decided = plan((spec_of(input), spec_of(weight)), tuple(letters), out, "", (1, 0))
    if bias is None:
        axes = axes_of(input, weight)
        return finished(F.linear(*moved((input, weight), decided, axes)), decided, axes)
    if decided.sums:  # the bias comes once, to the sum over the axis
        return torch.add(_linear(func, input, weight), bias)
    letters.append("o" if bias.dim() else "")
    return run(F.linear, [input, weight, bias], letters, out, "", (1, 0, 2))


def _matmul_letters(a: Tensor, b: Tensor) -> tuple[str, str, str]:
    dims = max(a.dim() - 2, b.dim() - 2, 0)
    batch = order(dims, "ijk")
    shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])

    def lead(t: Tensor) -> str:
        own = t.shape[:-2]
        names = batch[dims - len(own) :]
        wide = shape[dims - len(own) :]
        return "".join(n if s == w else NOTHING for n, s, w in zip(names, own, wide, strict=True))

    first = f"{lead(a)}ij" if a.dim() > 1 else "j"
    second = f"{lead(b)}jk" if b.dim() > 1 else "j"
    out = batch + "i" * (a.dim() > 1) + "k" * (b.dim() > 1)
    return first, second, out


@rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm,
      torch.mv, Tensor.mv, torch.dot, Tensor.dot)  # fmt: skip
def _matmul(func: Any, a: Tensor, b: Tensor) -> Any:
    first, second, out = _matmul_letters(a, b)
    return run(torch.matmul, [a, b], [first, second], out, "", (1, 0))


@rule(Tensor.__rmatmul__)
def _rmatmul(func: Any, a: Tensor, b: Tensor) -> Any:
    return torch.matmul(b, a)
