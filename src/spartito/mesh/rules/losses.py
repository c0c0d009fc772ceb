"""Losses; cross-entropy also where the classes are cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction as _Reduction

from spartito.mesh import collectives
from spartito.mesh.operand_plan import order, run
from spartito.mesh.rules.elementwise import broadcast
from spartito.mesh.rules.whole import compute_whole
from spartito.mesh.sharded_tensor import Sharded, made, rule, uncut


def _reduced(each: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return each
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return each.mean() if reduction == "mean" else each.sum()


def _pointwise(func: Any, operands: list[Tensor | None], reduction: str, **named: Any) -> Any:
    """A loss of each element for itself, and its sum or mean."""
    given = [each for each in operands if each is not None]
    shape = torch.broadcast_shapes(*(each.shape for each in given))
    out = order(len(shape))
    letters = ["" if each is None else broadcast(each.shape, shape, out) for each in operands]

    def local(x: Tensor, target: Tensor, *weights: Tensor | None) -> Tensor:
        more = dict(zip(_WEIGHTS.get(func, ()), weights, strict=True))
        return func(x, target, reduction="none", **more, **named)  # type: ignore[no-any-return]

    return _reduced(run(local, operands, letters, out), reduction)


_WEIGHTS = {
    F.binary_cross_entropy: ("weight",),
    F.binary_cross_entropy_with_logits: ("weight", "pos_weight"),
}


def _reducing(of: Callable[..., Any]) -> Callable[..., Any]:
    """The rule ``of`` a loss, which gets one ``reduction`` for torch's three arguments."""

    @wraps(of)
    def called(
        func: Any,
        *args: Any,
        size_average: Any = None,
        reduce: Any = None,
        reduction: str = "mean",
        **named: Any,
    ) -> Any:
        if size_average is not None or reduce is not None:
            reduction = str(_Reduction.legacy_get_string(size_average, reduce))
        return of(func, *args, reduction=reduction, **named)

    return called


@rule(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss)
@_reducing
def _regression(
    func: Any, input: Tensor, target: Tensor, *args: Any, reduction: str, **named: Any
) -> Any:
    if args or (named.get("weight") is not None):
        return compute_whole(func, (input, target, *args), {"reduction": reduction, **named})
    named.pop("weight", None)
    return _pointwise(func, [input, target], reduction, **named)


@rule(F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
@_reducing
def _binary(
    func: Any,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    *,
    reduction: str,
) -> Any:
    weights = [weight, pos_weight][: len(_WEIGHTS[func])]
    return _pointwise(func, [input, target, *weights], reduction)


@rule(F.kl_div)
@_reducing
def _kl_div(
    func: Any, input: Tensor, target: Tensor, *, reduction: str, log_target: bool = False
) -> Any:
    if reduction == "batchmean":
        total = _pointwise(func, [input, target], "sum", log_target=log_target)
        return total / input.shape[0]
    return _pointwise(func, [input, target], reduction, log_target=log_target)


@rule(F.cross_entropy, F.nll_loss)
@_reducing
def _of_classes(
    func: Any,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    if func is F.nll_loss:
        return _of_log(input, target, weight, ignore_index, reduction, 0.0)
    if input.dtype in (torch.bfloat16, torch.float16):  # as torch's kernel, which adds up in fp32
        loss = func(
            input.float(), target, weight, None, ignore_index, None, reduction, label_smoothing
        )
        return loss if torch.is_autocast_enabled(input.device.type) else loss.to(input.dtype)
    dim = 0 if input.dim() == 1 else 1
    if target.is_floating_point() or not isinstance(input, Sharded):
        scores = F.log_softmax(input, dim)
    else:
        scores = _log_softmax_of_shards(input, dim)
    return _of_log(scores, target, weight, ignore_index, reduction, label_smoothing)


def _log_softmax_of_shards(x: Sharded, dim: int) -> Tensor:
    """`log_softmax` along a dim that may be cut, of which the result is cut too."""
    axis = x.spec.dims[dim]
    if axis is None:
        return F.log_softmax(x, dim)
    along = x.axes[axis]
    most = along.most(x.local.detach().amax(dim, keepdim=True))
    shifted = x.local - most
    total = collectives.reduce(shifted.exp().sum(dim, keepdim=True), along)
    return made(shifted - collectives.enter(total.log(), along), x.spec, x.axes)


def _of_log(
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    smoothing: float,
) -> Tensor:
    """Cross-entropy of log-probabilities, as torch defines it, with few operations on them."""
    dim = 0 if scores.dim() == 1 else 1
    classes = scores.shape[dim]
    if target.is_floating_point():
        if smoothing:
            target = target * (1 - smoothing) + smoothing / classes
        each = scores * target
        if weight is not None:
            each = each * weight.view(-1, *[1] * (scores.dim() - dim - 1))
        loss = -each.sum(dim)
        if reduction == "mean":
            return loss.sum() / (scores.numel() / classes)
        return loss if reduction == "none" else loss.sum()
    counts = target != ignore_index
    safe = torch.where(counts, target, 0)
    if not safe.is_meta and not bool(((safe >= 0) & (safe < classes)).all()):
        wrong = safe[(safe < 0) | (safe >= classes)]
        raise IndexError(f"Target {int(wrong.flatten()[0])} is out of bounds.")
    scale = counts.to(scores.dtype)
    if weight is not None:
        table = weight if not isinstance(weight, Sharded) else weight.whole()
        scale = scale * table[safe]
    loss = -picked(scores, safe, dim) * scale
    weights = scale.sum()
    if smoothing:
        if weight is None:
            spread = scores.sum(dim)
        else:
            spread = (scores * weight.view(-1, *[1] * (scores.dim() - dim - 1))).sum(dim)
        smooth = -spread * counts.to(scores.dtype)
        loss = loss * (1 - smoothing) + smooth * (smoothing / classes)
    if reduction == "none":
        return loss
    return loss.sum() / weights if reduction == "mean" else loss.sum()


def picked(scores: Tensor, at: Tensor, dim: int) -> Tensor:
    """The element of each row of ``scores`` along ``dim`` that ``at`` says."""
    if not isinstance(scores, Sharded) or scores.spec.dims[dim] is None:
        return scores.gather(dim, at.unsqueeze(dim)).squeeze(dim)
    if isinstance(at, Sharded) or len(scores.spec.axes) > 1 or scores.spec.blocks:
        free = uncut(scores, dim)
        return free.gather(dim, at.unsqueeze(dim)).squeeze(dim)
    along = scores.axes[scores.spec.axes[0]]
    size = scores.local.shape[dim]
    own = at - along.index * size
    here = (own >= 0) & (own < size)
    found = scores.local.gather(dim, torch.where(here, own, 0).unsqueeze(dim)).squeeze(dim)
    return collectives.reduce(torch.where(here, found, 0), along)
