"""BatchNorm over the global batch, on any device: counts, means and squares merge by Welford.

The merging of (count, mean, sum of squared deviations) over parts follows Chan, Golub and
LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979);
unlike E[x^2] - E[x]^2 it loses no digits where the mean is large.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from spartito.accelerators import generator_states, set_generator_states
from spartito.collectives.collective import Collective
from spartito.engine.modules.kept_values import keeping_values
from spartito.engine.step_context import StepContext, current
from spartito.errors import UserError
from spartito.notes import warn


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


def _normalized(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, context: StepContext
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, and mean, variance and count over all replicas, by channel."""
    counts = bool(len(context.offsets))  # else these rows are spare ones
    output, mean, variance, count = _SyncNormalize.apply(  # type: ignore[no-untyped-call]
        input, weight, bias, eps, context.collective, counts
    )
    here = input.numel() // input.shape[1] if counts else 0
    if here <= 1 and count.item() == 1:  # as torch says on one device
        raise ValueError(
            "Expected more than 1 value per channel when training, got 1 over all replicas"
        )
    return output, mean, variance, count


@torch.no_grad()
def _follow(
    running: tuple[Tensor | None, Tensor | None],
    mean: Tensor,
    variance: Tensor,
    count: Tensor,
    momentum: float,
) -> None:
    """Move the running mean and variance towards those of a batch, if anybody had rows."""
    unbiased = variance * (count / (count - 1).clamp(min=1))
    for statistic, value in zip(running, (mean, unbiased), strict=True):
        if statistic is not None and count:
            statistic.lerp_(value.to(statistic.dtype), momentum)


_are_idle = False


@contextmanager
def idle_norms(model: nn.Module) -> Iterator[None]:
    """A block in which the norms of ``model`` that take statistics of a batch do nothing.

    What its code normalizes by itself is that of a replica's rows, and is computed as it is, unless
    the norms are not synchronized either.
    """
    global _are_idle
    norms = [module for module in model.modules() if takes_statistics(module)]
    apart = not all(isinstance(module, SynchronizedForward) for module in norms)
    before, _are_idle = _are_idle, True
    try:
        with WithoutStatistics() if apart else nullcontext():
            yield
    finally:
        _are_idle = before


class WithoutStatistics(TorchFunctionMode):
    """What normalizes over the batch does nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.batch_norm, torch.batch_norm):
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


class SynchronizedForward:
    """The forward pass that the synchronized classes share."""

    def forward(self: Any, input: Tensor) -> Any:
        """Normalize ``(batch, channels, ...)``; over all replicas inside a training step."""
        if _are_idle:
            return input
        context = _shared(self)
        if context is None:
            return super().forward(input)  # type: ignore[misc]
        self._check_input_dim(input)
        output, mean, variance, count = _normalized(
            input, self.weight, self.bias, self.eps, context
        )
        if count and self.track_running_stats:  # else what is computed counts for nothing
            self.num_batches_tracked.add_(1)
            momentum = self.momentum
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
            _follow((self.running_mean, self.running_var), mean, variance, count, momentum)
        return output

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Copied and pickled by its own class, which is synchronized again."""
        return _again, (_own_kind(self),), {**self.__dict__}


class SynchronizedCalls(SynchronizedForward):
    """A norm with a forward pass of its own, in which torch's functions see all replicas' rows."""

    def forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the class computes; its calls of `batch_norm` in a training step are global."""
        if _are_idle:
            with WithoutStatistics():
                return super(SynchronizedForward, self).forward(input, *args, **kwargs)  # type: ignore[misc]
        context = _shared(self)
        if context is None:
            return super(SynchronizedForward, self).forward(input, *args, **kwargs)  # type: ignore[misc]
        counts = len(context.offsets)
        if counts:
            self._try_all_rows(input, context, args, kwargs)
        before = [] if counts else [(each, each.clone()) for each in self.buffers(recurse=False)]
        with _SynchronizedFunctions(self, input, context) as calls:
            output = super(SynchronizedForward, self).forward(input, *args, **kwargs)  # type: ignore[misc]
        if not calls.count:  # nobody has a row, or no statistics were taken
            for buffer, value in before:
                buffer.copy_(value)
        return output

    @torch.no_grad()
    def _try_all_rows(
        self: Any, input: Tensor, context: StepContext, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """Refuse a class that would cut as many rows as the global batch has into parts.

        A replica's rows alone may be too few to show that (ghost BatchNorm). Each number of rows is
        tried once, on some that count for nothing: a larger batch may be cut where another is not.
        """
        rows = input.shape[0] * context.global_size // len(context.offsets)
        tried = self.__dict__.setdefault(_TRIED, set())
        if rows in tried:
            return
        whole = input[:1].expand(rows, *input.shape[1:])
        drawn = generator_states(input.device)
        trial = _SynchronizedFunctions(self, whole, context, is_trial=True)
        try:
            with keeping_values(self.buffers(recurse=False)), trial:
                super(SynchronizedForward, self).forward(whole, *args, **kwargs)  # type: ignore[misc]
        finally:
            set_generator_states(input.device, drawn)
        tried.add(rows)


class _SynchronizedFunctions(TorchFunctionMode):
    """Inside of it the functions of torch that normalize over a batch do so over all replicas.

    In a trial they are looked at, and normalize what they get.
    """

    def __init__(
        self, module: Any, input: Tensor, context: StepContext, is_trial: bool = False
    ) -> None:
        super().__init__()
        self._module, self._shape, self._context = module, input.shape, context
        self._is_trial = is_trial
        self._calls = 0
        self.count = 0.0
        """Rows over all replicas in the last call that took statistics."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        signature = _FUNCTIONS.get(func)
        if signature is None:
            return func(*args, **kwargs)
        found = signature.bind(*args, **kwargs)
        found.apply_defaults()
        given = found.arguments
        if not given.get("training", given.get("use_input_stats")):
            return func(*args, **kwargs)
        if func in _BY_INSTANCE:
            return func(*args, **kwargs) if self._is_trial else self._by_instance(func, found)
        input: Tensor = given["input"]
        self._check(input.shape, given["running_mean"], given["weight"])
        if self._is_trial:
            return func(*args, **kwargs)
        output, mean, variance, count = _normalized(
            input, given["weight"], given["bias"], given["eps"], self._context
        )
        running = given["running_mean"], given["running_var"]
        _follow(running, mean, variance, count, given["momentum"])
        self.count = float(count)
        return output

    def _check(self, shape: torch.Size, *of_channels: Tensor | None) -> None:
        """Refuse what mixes rows of the batch in another way than over all of them."""
        # On a mesh a module's tensors are a part of num_features.
        here = (len(each) for each in of_channels if each is not None)
        channels, rest = next(here, self._module.num_features), shape[1:]
        is_part = rest == self._shape[1:] and shape[0] != self._shape[0]
        if shape[1] != channels or is_part or self._calls:
            raise UserError(
                f"{name_of(self._module)} normalizes {tuple(shape)} of its input "
                f"{tuple(self._shape)}, and not all rows together: it cannot be synchronized",
                "Parts of a replica's rows are others than parts of the whole batch. Take a norm "
                "over all rows, or one without a batch, as GroupNorm.",
            )
        self._calls += 1

    def _by_instance(self, func: Any, found: inspect.BoundArguments) -> Any:
        """Instances are normalized by themselves; the running statistics are their mean."""
        given = found.arguments
        output = func(*found.args, **found.kwargs)
        running = [s for s in (given["running_mean"], given["running_var"]) if s is not None]
        if running:
            rows = len(self._context.offsets) and given["input"].shape[0]
            self.count = _average(running, rows, self._context.collective)
        return output


@torch.no_grad()
def _average(tensors: Sequence[Tensor], rows: int, collective: Collective) -> float:
    """The means over all replicas, weighted by rows, in place; returns how many rows there are."""
    flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors])
    parts = collective.all_gather(torch.cat([flat.new_tensor([rows]), flat]))
    count = sum(float(part[0]) for part in parts)
    if count:
        mean = torch.stack([part[1:] * (part[0] / count) for part in parts if part[0]]).sum(0)
        for tensor, value in zip(tensors, mean.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(value.view_as(tensor))
    return count


def _shared(module: Any) -> StepContext | None:
    """The step that runs, if ``module`` takes statistics of it and others have a part of them."""
    context = current()
    if context is None or not module.training or context.collective.world_size == 1:
        return None
    return context


def _raw(*names: str) -> inspect.Signature:
    """The signature of one of torch's built-in functions."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind) for name in names])


_BUILT_IN = ("input", "weight", "bias", "running_mean", "running_var")
_FUNCTIONS: dict[Any, inspect.Signature] = {
    F.batch_norm: inspect.signature(F.batch_norm),
    F.instance_norm: inspect.signature(F.instance_norm),
    torch.batch_norm: _raw(*_BUILT_IN, "training", "momentum", "eps", "cudnn_enabled"),
    torch.instance_norm: _raw(*_BUILT_IN, "use_input_stats", "momentum", "eps", "cudnn_enabled"),
}
_BY_INSTANCE = (F.instance_norm, torch.instance_norm)


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
_NAME, _TRIED = "_spartito_name", "_spartito_tried"


def synchronize_batchnorm(model: nn.Module) -> None:
    """Make every norm of ``model`` that takes statistics of a batch take those of the global one.

    In place: names, state and ``isinstance(module, nn.BatchNorm2d)`` stay as they are. Subclasses
    keep their own forward pass.
    """
    for name, module in model.named_modules():
        if takes_statistics(module) and not isinstance(module, SynchronizedForward):
            module.__dict__[_NAME] = name
            module.__class__ = _synchronized(type(module))


def separate_batchnorm(model: nn.Module) -> None:
    """Give the norms that `synchronize_batchnorm` has changed their own classes back."""
    for module in model.modules():
        if isinstance(module, SynchronizedForward):
            module.__class__ = _own_kind(module)
            for key in (_NAME, _TRIED):
                module.__dict__.pop(key, None)


def takes_statistics(module: nn.Module) -> bool:
    """Whether ``module`` is one of torch's norms over batches, or keeps the mean of instances."""
    if not isinstance(module, _NormBase) or any(map(is_lazy, module.parameters())):
        return False
    return isinstance(module, _BatchNorm) or module.track_running_stats


def asks_for_synchronization(model: nn.Module) -> bool:
    """Whether ``model`` has torch's own norm over all replicas."""
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def check_evaluation(model: nn.Module, deterministic: bool) -> bool:
    """Warn of a norm that takes statistics of the rows that it is evaluated on.

    It is asked before each batch, and 0.1 us a module are not felt there.

    Args:
        model: Of which each replica evaluates other rows.
        deterministic: Whether figures are to be those of one device.

    Returns:
        Whether there is one.

    Raises:
        UserError: There is one, and the training is deterministic.
    """
    waiting = [model]
    while waiting:  # `named_modules` takes four times as long
        module = waiting.pop()
        if isinstance(module, _BatchNorm) and module._buffers.get("running_mean") is None:
            break
        for inner in module._modules.values():
            if inner is not None:
                waiting.append(inner)
    else:
        return False
    name = next(name for name, each in model.named_modules() if each is module)
    what = (
        f"{type(module).__name__} {name!r} keeps no running statistics: each replica evaluates "
        "with those of its own rows (of a microbatch), so figures depend on how many there are"
    )
    do = "Build it with track_running_stats=True, or evaluate on one device."
    if deterministic:
        raise UserError(what, do)
    warn("%s. %s", what, do)
    return True


def _synchronized(kind: Any) -> Any:
    """``kind`` over the global batch; with torch's own forward pass it needs no look at calls."""
    found = _SYNCHRONIZED.get(kind)
    if found is None:
        is_plain = kind.forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
        bases = (SynchronizedForward if is_plain else SynchronizedCalls, kind)
        body = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        found = _SYNCHRONIZED[kind] = type(kind.__name__, bases, body)
    return found


def _own_kind(module: Any) -> Any:
    """The class that a synchronized norm had before."""
    every = type(module).__mro__
    return every[every.index(SynchronizedForward) + 1]


def _again(kind: Any) -> Any:
    """An empty module of the synchronized ``kind``, whose state comes later."""
    return (found := _synchronized(kind)).__new__(found)


def name_of(module: nn.Module) -> str:
    """The class of a synchronized norm, and where it is in its model."""
    return f"{type(module).__name__} {module.__dict__.get(_NAME, '')!r}"


def has_batchnorm(model: nn.Module) -> bool:
    """Whether ``model`` takes statistics of batches at all."""
    return any(map(takes_statistics, model.modules()))


def is_synchronized(model: nn.Module) -> bool:
    """Whether `synchronize_batchnorm` has changed a norm of ``model``."""
    return any(isinstance(module, SynchronizedForward) for module in model.modules())


def batchnorms(model: nn.Module) -> list[_BatchNorm]:
    """All BatchNorms of ``model``."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def local_batchnorms(model: nn.Module) -> list[_BatchNorm]:
    """The BatchNorms of ``model`` that each replica computes over its own rows."""
    return [norm for norm in batchnorms(model) if not isinstance(norm, SynchronizedForward)]


def local_norms(model: nn.Module) -> list[nn.Module]:
    """As `local_batchnorms`, with those that keep the mean of instances."""
    return [
        module
        for module in model.modules()
        if takes_statistics(module) and not isinstance(module, SynchronizedForward)
    ]


def keeping_statistics(model: nn.Module) -> AbstractContextManager[None]:
    """A forward pass over spare rows, whose own statistics count for nothing."""
    return keeping_values(buffer for norm in local_norms(model) for buffer in norm.buffers())


@torch.no_grad()
def average_statistics(model: nn.Module, collective: Collective) -> None:
    """Average the running statistics of every BatchNorm over the replicas, in place.

    All have counted as many batches as the first one then, which has rows of each.
    """
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    means = [b for norm in norms for b in (norm.running_mean, norm.running_var) if b is not None]
    if collective.world_size == 1 or not means:
        return
    counts = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
    first = float(collective.rank == 0)
    parts = [buffer.reshape(-1).double() for buffer in (*means, *counts)]
    parts[len(means) :] = [part * first for part in parts[len(means) :]]
    found = collective.all_reduce(torch.cat(parts)).split([part.numel() for part in parts])
    for buffer, total in zip(means, found, strict=False):
        buffer.copy_((total / collective.world_size).view_as(buffer))
    for buffer, total in zip(counts, found[len(means) :], strict=True):
        buffer.copy_(total.view_as(buffer))


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
