"""Linear layers and products of matrices."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spartito.mesh.operand_plan import NOTHING, axes_of, moved, order, plan, run, spec_of, summed
from spartito.mesh.rules.elementwise import broadcast
from spartito.mesh.rules.whole import compute_whole
from spartito.mesh.sharded_tensor import rule


@rule(F.linear, torch._C._nn.linear)
def _linear(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    batch = order(input.dim() - 1, "io")
    letters = [f"{batch}i", "oi"[2 - weight.dim() :] if weight.dim() == 2 else "i"]
    out = f"{batch}o" if weight.dim() == 2 else batch
    decided = plan((spec_of(input), spec_of(weight)), tuple(letters), out, "", (1, 0))
    if bias is None:
        axes = axes_of(input, weight)
        return summed(func(*moved((input, weight), decided, axes)), decided, axes)
    if decided.sums:  # the bias comes once, to the sum over the axis
        return torch.add(_linear(func, input, weight), bias)
    letters.append("o" if bias.dim() else "")
    return run(func, [input, weight, bias], letters, out, "", (1, 0, 2))


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
    return run(torch.matmul, [a, b], [first, second], out, "", (1, 0), summed)


@rule(Tensor.__rmatmul__)
def _rmatmul(func: Any, a: Tensor, b: Tensor) -> Any:
    return torch.matmul(b, a)


@rule(torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm, torch.addmv, Tensor.addmv)
def _added(func: Any, x: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    first, second, out = _matmul_letters(a, b)
    shape = torch.Size([*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2]])
    shape = torch.Size([*shape, b.shape[-1]]) if b.dim() > 1 else shape
    decided = plan((spec_of(a), spec_of(b)), (first, second), out, "", (1, 0))
    if decided.sums:  # what is added comes once, to the sum over the axis
        product = torch.matmul(a, b)
        product = product if alpha == 1 else product * alpha
        return product + (x if beta == 1 else x * beta)
    letters = (broadcast(x.shape, shape, out), first, second)

    def local(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return func(x, a, b, beta=beta, alpha=alpha)  # type: ignore[no-any-return]

    return run(local, [x, a, b], letters, out, "", (2, 1, 0))


@rule(torch.einsum, torch.functional.einsum)
def _einsum(func: Any, equation: Any, *operands: Any) -> Any:
    given = (
        operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    )
    letters, out = _equation(equation, given) if isinstance(equation, str) else ([], "")
    sizes: dict[str, set[int]] = {}
    for names, operand in zip(letters, given, strict=False):
        for name, size in zip(names, operand.shape, strict=False):
            sizes.setdefault(name, set()).add(size)
    repeats = any(len(set(names)) < len(names) for names in letters)
    if not letters or repeats or any(len(each) > 1 for each in sizes.values()):
        return compute_whole(func, (equation, *operands), {})
    plain = f"{','.join(letters)}->{out}"
    return run(
        lambda *parts: torch.einsum(plain, *parts), given, letters, out, "",
        tuple(reversed(range(len(given)))),
    )  # fmt: skip


def _equation(equation: str, operands: Any) -> tuple[list[str], str]:
    """The letters of operands and result, without "..."; nothing where that is not so simple."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    letters = left.split(",")
    if len(letters) != len(operands):
        return [], ""
    if not arrow:
        counts = {name: left.count(name) for name in sorted(set(left)) if name.isalpha()}
        out = ("..." if "..." in left else "") + "".join(n for n, c in counts.items() if c == 1)
    wide = max(
        (each.dim() - len(names) + 3 for names, each in zip(letters, operands, strict=True)
         if "..." in names),
        default=0,
    )  # fmt: skip
    more = order(wide, left)
    found = []
    for names, each in zip(letters, operands, strict=True):
        own = each.dim() - len(names) + 3 if "..." in names else 0
        found.append(names.replace("...", more[wide - own :]))
    return found, out.replace("...", more)
