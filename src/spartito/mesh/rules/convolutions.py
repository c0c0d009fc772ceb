"""Convolutions, pooling and other operations on the last dims of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spartito.mesh.operand_plan import axes_of, finished, moved, plan, run, spec_of
from spartito.mesh.rules.reductions import along
from spartito.mesh.rules.whole import compute_whole
from spartito.mesh.sharded_tensor import Sharded, like, rule, uncut

SPACE = "xyz"
KERNEL = "uvw"


def _convolve(
    local: Callable[[Tensor, Tensor, Tensor | None, int], Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    names: tuple[str, str],
) -> Tensor:
    """A convolution; ``names`` are the letters of input channels and of the weight's channels."""
    dims = weight.dim() - 2
    batch = "b" * (x.dim() - dims - 1)
    out = names[1].replace(names[0], "") if groups == 1 else "C"
    letters = [f"{batch}{names[0]}{SPACE[:dims]}", f"{names[1]}{KERNEL[:dims]}"]
    result = f"{batch}{out}{SPACE[:dims]}"
    whole = SPACE[:dims] + KERNEL[:dims] + (names[1][1] if groups > 1 else "")
    operands: list[Any] = [x, weight]
    decided = plan((spec_of(x), spec_of(weight)), tuple(letters), result, whole, (1, 0))
    if bias is not None and not decided.sums:
        operands.append(bias)
        letters.append(out)
        specs = tuple(map(spec_of, operands))
        decided = plan(specs, tuple(letters), result, whole, (1, 0, 2))
    axes = axes_of(*operands)
    parts = decided.sizes(axes).get("C", 1)
    if groups > 1 and (groups % parts or any(blocks for *_, blocks in decided.cut)):
        x, weight = uncut(x, -dims - 1), uncut(weight, 0)
        bias = None if bias is None else uncut(bias, 0)
        if not any(isinstance(each, Sharded) for each in (x, weight, bias)):
            return local(x, weight, bias, groups)
        return _convolve(local, x, weight, bias, groups, names)
    given = moved(operands, decided, axes)
    made = finished(
        local(given[0], given[1], given[2] if len(given) > 2 else None, groups // parts),
        decided,
        axes,
    )
    if bias is None or len(given) > 2:
        return made
    return made + bias.view(-1, *[1] * dims)  # once, to the sum over the axis


@rule(torch.conv1d, torch.conv2d, torch.conv3d)
def _conv(
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    def local(x: Tensor, w: Tensor, b: Tensor | None, groups: int) -> Tensor:
        return func(x, w, b, stride, padding, dilation, groups)  # type: ignore[no-any-return]

    names = ("i", "oi") if groups == 1 else ("C", "Ci")
    dims = weight.dim() - 2
    steps = (stride,) * dims if isinstance(stride, int) else tuple(stride)
    if (
        isinstance(input, Sharded)
        and max(steps) > 1 == max(weight.shape[2:]) == groups
        and len(steps) == dims
        and padding in (0, (0,) * dims, "valid")
        and not any(input.spec.dims[-dims:])
    ):
        input, stride = _every(input, steps), 1
    return _convolve(local, input, weight, bias, groups, names)


def _every(x: Sharded, steps: tuple[int, ...]) -> Tensor:
    """What a convolution of single points with such strides reads: the rest need not cross."""
    last = x.local.dim() == 4 and x.local.is_contiguous(memory_format=torch.channels_last)
    read: Any = (..., *(slice(None, None, step) for step in steps))
    form = torch.channels_last if last else torch.contiguous_format
    return like(x.local[read].contiguous(memory_format=form), x)


@rule(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
def _conv_transpose(
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    def local(x: Tensor, w: Tensor, b: Tensor | None, groups: int) -> Tensor:
        return func(  # type: ignore[no-any-return]
            x, w, b, stride, padding, output_padding, groups, dilation
        )

    names = ("i", "io") if groups == 1 else ("C", "Co")
    return _convolve(local, input, weight, bias, groups, names)


def _in_space(dims: int) -> Callable[..., Any]:
    def pool(func: Any, x: Tensor, *args: Any, **named: Any) -> Any:
        if not isinstance(x, Sharded) or any(isinstance(each, Tensor) for each in args):
            return compute_whole(func, (x, *args), named)
        return along(func, x, range(-dims, 0), *args, **named)

    return pool


_POOLS = """
max_pool{} max_pool{}_with_indices avg_pool{} adaptive_avg_pool{} adaptive_max_pool{}
adaptive_max_pool{}_with_indices lp_pool{}
"""
for _dims in (1, 2, 3):
    _pool = _in_space(_dims)
    for _name in _POOLS.format(*[f"{_dims}d"] * 7).split():
        _found = [getattr(home, _name, None) for home in (F, torch, torch._C._nn)]
        rule(*(each for each in _found if each is not None))(_pool)


@rule(F.interpolate, F.upsample)
def _interpolate(func: Any, x: Tensor, *args: Any, **named: Any) -> Any:
    return along(func, x, range(2, x.dim()), *args, **named)


@rule(F.pad, torch._C._nn.pad)
def _pad(func: Any, x: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    pairs = [(pad[n], pad[n + 1]) for n in range(0, len(pad), 2)]
    dims = [-1 - n for n, pair in enumerate(pairs) if mode != "constant" or any(pair)]
    return along(F.pad, x, dims, pad, mode, value)


@rule(F.pixel_shuffle, torch.pixel_shuffle, F.pixel_unshuffle, torch.pixel_unshuffle)
def _pixel_shuffle(func: Any, x: Tensor, factor: int) -> Any:
    return along(func, x, [-3, -2, -1], factor)


@rule(F.unfold, F.fold)
def _unfold(func: Any, x: Tensor, *args: Any, **named: Any) -> Any:
    x = uncut(x, *range(1, x.dim()))
    if not isinstance(x, Sharded):
        return func(x, *args, **named)
    letters = "bcxy"[: x.dim()]
    out = "bcx" if func is F.unfold else "bcxy"
    return run(lambda t: func(t, *args, **named), [x], [letters], out)
