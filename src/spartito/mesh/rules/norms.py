"""Normalization over the last dims, over groups of channels and over batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spartito.mesh.operand_plan import axes_of, finished, moved, order, plan, run, spec_of
from spartito.mesh.rules.whole import compute_whole
from spartito.mesh.sharded_tensor import made, rule, uncut, whole
from spartito.mesh.spec import spec


@rule(F.layer_norm, torch.layer_norm)
def _layer_norm(
    func: Any,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    return _over_last(F.layer_norm, input, normalized_shape, [weight, bias], eps)


@rule(F.rms_norm, torch.rms_norm)
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


@rule(F.group_norm, torch.group_norm)
def _group_norm(
    func: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    names = "bC" + order(input.dim() - 2, "bC")
    operands = [input, weight, bias]
    decided = plan(tuple(map(spec_of, operands)), (names, "C", "C"), names, names[2:])
    axes = axes_of(*operands)
    parts = decided.sizes(axes).get("C", 1)
    if num_groups % parts or any(blocks for *_, blocks in decided.cut):
        free = [
            uncut(input, 1),
            *(each if each is None else uncut(each, 0) for each in operands[1:]),
        ]
        return F.group_norm(free[0], num_groups, free[1], free[2], eps)  # type: ignore[arg-type]
    x, weight, bias = moved(operands, decided, axes)
    return finished(F.group_norm(x, num_groups // parts, weight, bias, eps), decided, axes)


Stats = Tensor | None


def _over_batch(
    norm: Callable[..., Tensor],
    x: Tensor,
    stats: list[Stats],
    affine: list[Stats],
    follows: bool,
    *rest: float,
) -> Tensor:
    """A norm whose running statistics change in place where it ``follows`` the batch.

    Then the channels alone may be cut, else every dim.
    """
    names = "bC" + order(x.dim() - 2, "bC")
    operands = [x, *affine, *stats]
    fixed = names.replace("C", "") if follows else ""
    decided = plan(tuple(map(spec_of, operands)), (names, *["C"] * 4), names, fixed)
    axes = axes_of(*operands)
    local, weight, bias, *own = moved(operands, decided, axes)
    # Statistics that lie otherwise than the channels are changed in a copy, and copied back.
    kept = [
        each if value is None or not follows or _lies(value, decided) else each.clone()
        for each, value in zip(own, stats, strict=True)
    ]
    result = finished(norm(local, *kept, weight, bias, follows, *rest), decided, axes)
    for each, before, value in zip(kept, own, stats, strict=True):
        if each is not before and value is not None:
            cut = [(axis, blocks) for name, axis, blocks in decided.cut if name == "C"]
            total = made(each, spec((cut[0][0],), (), (cut[0][1],)), axes) if cut else each
            with torch.no_grad():
                value.copy_(whole(total))
    return result


def _lies(value: Tensor, decided: Any) -> bool:
    """Whether a statistic is cut as the channels are."""
    cut = next(((axis, blocks) for name, axis, blocks in decided.cut if name == "C"), (None, ()))
    here = spec_of(value)
    return (here.dims[0], here.blocks_of(0)) == cut if here else cut[0] is None


@rule(F.batch_norm)
def _batch_norm(
    func: Any,
    input: Tensor,
    running_mean: Stats,
    running_var: Stats,
    weight: Stats = None,
    bias: Stats = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    stats = [running_mean, running_var]
    return _over_batch(F.batch_norm, input, stats, [weight, bias], training, momentum, eps)


@rule(torch.batch_norm, torch.instance_norm)
def _built_in(
    func: Any,
    input: Tensor,
    weight: Stats,
    bias: Stats,
    running_mean: Stats,
    running_var: Stats,
    *rest: Any,
    **named: Any,
) -> Any:
    """Torch's own, below the functions: they take the same, in another order."""

    def norm(x: Tensor, mean: Stats, var: Stats, weight: Stats, bias: Stats, *rest: Any) -> Tensor:
        found: Tensor = func(x, weight, bias, mean, var, *rest)
        return found

    names = ("training", "use_input_stats", "momentum", "eps", "cudnn_enabled")
    rest = (*rest, *(named[name] for name in names if name in named))
    stats = [running_mean, running_var]
    return _over_batch(norm, input, stats, [weight, bias], *rest)


@rule(F.instance_norm)
def _instance_norm(
    func: Any,
    input: Tensor,
    running_mean: Stats = None,
    running_var: Stats = None,
    weight: Stats = None,
    bias: Stats = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    stats = [running_mean, running_var]
    return _over_batch(
        F.instance_norm, input, stats, [weight, bias], use_input_stats, momentum, eps
    )


@rule(F.local_response_norm)
def _local_response_norm(func: Any, x: Tensor, *args: Any, **named: Any) -> Any:
    return compute_whole(func, (x, *args), named)
