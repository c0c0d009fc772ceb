"""BatchNorm over the global batch, on any device: counts, means and squares merge by Welford.

The merging of (count, mean, sum of squared deviations) over parts follows Chan, Golub and
LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979);
unlike E[x^2] - E[x]^2 it loses no digits where the mean is large.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spartito.collectives.collective import Collective
from spartito.engine.context import current


class _SyncNormalize(torch.autograd.Function):
    """(input - mean) / std over all replicas, times weight, plus bias."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        collective: Collective,
        counts: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count, mean, squares = merge(collective, *local_moments(input if counts else input[:0]))
        variance = squares / count.clamp(min=1)
        inverse = torch.rsqrt(variance + eps)
        normalized = (input - _wide(mean, input)) * _wide(inverse, input)
        output = normalized
        if weight is not None:
            output = output * _wide(weight, input)
        if bias is not None:
            output = output + _wide(bias, input)
        ctx.save_for_backward(normalized, weight, inverse, count)
        ctx.collective, ctx.has_bias, ctx.counts = collective, bias is not None, counts
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        normalized, weight, inverse, count = ctx.saved_tensors
        dims = _all_but_channels(grad)
        wide = grad.to(normalized.dtype)
        counted = slice(None) if ctx.counts else slice(0)
        sum_grad = wide[counted].sum(dims)
        sum_product = (wide * normalized)[counted].sum(dims)
        # Gradients of weight and bias stay local: the strategy sums them like all others.
        local_grad, local_product = sum_grad.clone(), sum_product.clone()
        both = ctx.collective.all_reduce(torch.cat([sum_grad, sum_product]))
        mean_grad, mean_product = (both / count).chunk(2)
        scale = inverse if weight is None else inverse * weight
        grad_input = _wide(scale, grad) * (
            wide - _wide(mean_grad, grad) - normalized * _wide(mean_product, grad)
        )
        if not ctx.counts:
            grad_input = torch.zeros_like(grad_input)  # nothing that counts came from here
        return (
            grad_input.to(grad.dtype),
            None if weight is None else local_product,
            local_grad if ctx.has_bias else None,
            None,
            None,
            None,
        )


class SynchronizedForward:
    """The forward pass that the synchronized classes share."""

    def forward(self: Any, input: Tensor) -> Any:
        """Normalize ``(batch, channels, ...)``; over all replicas inside a training step."""
        context = current()
        if context is None or not self.training or context.collective.world_size == 1:
            return super().forward(input)  # type: ignore[misc]
        self._check_input_dim(input)
        counts = bool(len(context.offsets))  # else these rows are spare ones
        output, mean, variance, count = _SyncNormalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, context.collective, counts
        )
        if not count:  # nobody here has a row: what is computed counts for nothing
            return output
        here = input.numel() // input.shape[1] if counts else 0
        if here <= 1 and count.item() <= 1:  # as torch says on one device
            raise ValueError(
                "Expected more than 1 value per channel when training, got 1 over all replicas"
            )
        if self.track_running_stats:
            self._follow(mean, variance, count)
        return output

    @torch.no_grad()
    def _follow(self: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class SyncBatchNorm1d(SynchronizedForward, nn.BatchNorm1d):
    """`nn.BatchNorm1d` over the global batch."""


class SyncBatchNorm2d(SynchronizedForward, nn.BatchNorm2d):
    """`nn.BatchNorm2d` over the global batch."""


class SyncBatchNorm3d(SynchronizedForward, nn.BatchNorm3d):
    """`nn.BatchNorm3d` over the global batch."""


_SYNCHRONIZED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
}


def synchronize_batchnorm(model: nn.Module) -> None:
    """Make every BatchNorm of ``model`` one over the global batch, in place.

    Names, state and ``isinstance(module, nn.BatchNorm2d)`` stay as they are.
    """
    for module in model.modules():
        synchronized = _SYNCHRONIZED.get(type(module))
        if synchronized is not None:
            module.__class__ = synchronized


def has_batchnorm(model: nn.Module) -> bool:
    """Whether ``model`` normalizes over batches at all."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def local_batchnorms(model: nn.Module) -> list[_BatchNorm]:
    """The BatchNorms of ``model`` that each replica computes over its own rows."""
    return [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, SynchronizedForward)
    ]


@contextmanager
def keeping_statistics(model: nn.Module) -> Iterator[None]:
    """A forward pass over spare rows, whose own statistics count for nothing."""
    buffers = [buffer for module in local_batchnorms(model) for buffer in module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


@torch.no_grad()
def average_statistics(model: nn.Module, collective: Collective) -> None:
    """Average the running statistics of every BatchNorm over the replicas, in place."""
    stats = [
        buffer
        for module in model.modules()
        if isinstance(module, _BatchNorm)
        for buffer in (module.running_mean, module.running_var)
        if buffer is not None
    ]
    if collective.world_size == 1 or not stats:
        return
    flat = torch.cat([buffer.reshape(-1).double() for buffer in stats])
    collective.all_reduce(flat).div_(collective.world_size)
    for buffer, mean in zip(stats, flat.split([b.numel() for b in stats]), strict=True):
        buffer.copy_(mean.view_as(buffer))


def local_moments(input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared deviations of each channel of ``(batch, channels, ...)``.

    Shapes ``()``, ``(channels,)``, ``(channels,)``; at least in fp32; zeros for no rows.
    """
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    count = wide.new_tensor(input.numel() // max(1, input.shape[1]))
    dims = _all_but_channels(input)
    if not input.numel():
        nothing = wide.new_zeros(input.shape[1])
        return count, nothing, nothing.clone()
    variance, mean = torch.var_mean(wide, dims, correction=0)
    return count, mean, variance * count


def merge(
    collective: Collective, count: Tensor, mean: Tensor, squares: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The moments over all replicas from those of each, in the order of the ranks."""
    parts = collective.all_gather(torch.cat([count.view(1), mean, squares]))
    channels = mean.numel()
    count, mean, squares = parts[0][0], parts[0][1 : 1 + channels], parts[0][1 + channels :]
    for part in parts[1:]:
        more, other, deviations = part[0], part[1 : 1 + channels], part[1 + channels :]
        both = count + more
        gap = other - mean
        share = more / both.clamp(min=1)
        mean = mean + gap * share
        squares = squares + deviations + gap.square() * count * share
        count = both
    return count, mean, squares


def _all_but_channels(input: Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


def _wide(channels: Tensor, input: Tensor) -> Tensor:
    return channels.view(1, -1, *[1] * (input.dim() - 2))
