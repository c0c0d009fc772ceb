"""Random operations of torch, drawn by keys instead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spartito.errors import UserError

aten = torch.ops.aten
Fill = Callable[[Tensor, torch.Generator], object]
Shape = tuple[int, ...]
Draws = list[tuple[Any, Shape]]
"""Random operations and the shapes of what they draw, in order."""


class Drawing(TorchDispatchMode, ABC):
    """Gives random operations the numbers that `draw` says."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not is_quiet(func, args, kwargs):
            return random(func, args, kwargs, self.draw)
        return func(*args, **kwargs)

    @abstractmethod
    def draw(self, func: Any, shape: Shape, dtype: torch.dtype, fill: Fill) -> Tensor:
        """What ``func`` draws: a tensor of ``shape``, by ``fill``; `UserError` if it may not."""


class Recording(Drawing):
    """Notes which random operations there are, and draws for the rows that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Draws = []

    def draw(self, func: Any, shape: Shape, dtype: torch.dtype, fill: Fill) -> Tensor:
        """A tensor of ``shape``, for the rows that are seen."""
        self.made.append((func, shape))
        return filled(shape, dtype, fill, next_key()[1])


def next_key() -> tuple[int, torch.Generator]:
    """The next key of torch's generator, and one that draws by it."""
    key = int(torch.randint(1 << 62, ()))
    return key, torch.Generator().manual_seed(key)


def filled(shape: Shape, dtype: torch.dtype, fill: Fill, generator: torch.Generator) -> Tensor:
    """Drawn on the CPU, so that all kinds of devices draw alike."""
    made = torch.empty(shape, dtype=dtype, device="cpu")
    fill(made, generator)
    return made


def refusal(func: Any, why: str) -> UserError:
    """The error for an operation that cannot be divided."""
    name = func._schema.name.replace("aten::", "torch's ")
    return UserError(
        f"{name} draws at random, and cannot give one device's numbers: {why}",
        "Leave deterministic=True out, or draw with dropout, torch.rand or torch.randn, the "
        "examples in a dim of their own.",
    )


# What each random operation does with its draw


def is_quiet(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it draws nothing this time."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    given = defaults | given
    if not given.get("training", True) or not given.get("train", True):
        return True
    return any(given.get(name, 1.0) == 0.0 for name in ("dropout_p", "dropout"))


_Draw = Callable[[Any, Shape, torch.dtype, Fill], Tensor]

_IN_PLACE = {
    aten.bernoulli_.float, aten.uniform_.default, aten.normal_.default, aten.exponential_.default,
    aten.geometric_.default, aten.cauchy_.default, aten.log_normal_.default, aten.random_.default,
    aten.random_.to, getattr(aten.random_, "from"),
}  # fmt: skip

_NEW: dict[Any, Callable[..., Any]] = {
    aten.rand.default: Tensor.uniform_,
    aten.randn.default: Tensor.normal_,
    aten.rand_like.default: Tensor.uniform_,
    aten.randn_like.default: Tensor.normal_,
}

_NORMALS = {aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor}


def random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], draw: _Draw) -> Any:
    """The result of a random operation whose numbers come from ``draw``."""
    if kwargs.get("generator") is not None:
        raise refusal(func, "a generator of your own")
    kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    first = args[0]
    if func in _IN_PLACE:
        fill: Fill = lambda made, by: func(made, *args[1:], **kwargs, generator=by)  # noqa: E731
        return first.copy_(draw(func, tuple(first.shape), first.dtype, fill))
    if func in _NEW:
        made = torch.empty_like if isinstance(first, Tensor) else torch.empty
        out = made(first, **kwargs)
        numbers = _NEW[func]
        fill = lambda made, by: numbers(made, generator=by)  # noqa: E731
        return out.copy_(draw(func, tuple(out.shape), out.dtype, fill))
    if func in (aten.randint.default, aten.randint.low):
        low, high = (0, first) if func is aten.randint.default else args[:2]
        out = torch.empty(args[-1], **{"dtype": torch.int64, **kwargs})
        fill = lambda made, by: made.random_(low, high, generator=by)  # noqa: E731
        return out.copy_(draw(func, tuple(out.shape), out.dtype, fill))
    if func is aten.randperm.default:
        out = torch.empty(first, **{"dtype": torch.int64, **kwargs})
        fill = lambda made, by: made.copy_(torch.randperm(len(made), generator=by))  # noqa: E731
        return out.copy_(draw(func, tuple(out.shape), out.dtype, fill))
    if func in (aten.bernoulli.default, aten.bernoulli_.Tensor):
        chance = first if func is aten.bernoulli.default else args[1].expand_as(first)
        drawn = draw(func, tuple(chance.shape), torch.float32, _uniform)
        hit = drawn.to(chance.device) < chance
        return hit.to(first.dtype) if func is aten.bernoulli.default else first.copy_(hit)
    if func is aten.native_dropout.default:  # of accelerators: as dropout on a CPU, bit by bit
        keep, one = 1 - args[1], aten.bernoulli_.float
        fill = lambda made, by: one(made, keep, generator=by)  # noqa: E731
        noise = draw(one, tuple(first.shape), first.dtype, fill).to(first.device)
        return first * (noise / keep), noise.bool()
    if func in (aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default):
        _, noise, *bounds = args
        low, high = (*bounds, 0.125, 1 / 3)[:2] if len(bounds) < 2 else bounds[:2]
        fill = lambda made, by: made.uniform_(low, high, generator=by)  # noqa: E731
        slope = draw(func, tuple(first.shape), first.dtype, fill).to(first.device)
        noise.copy_(torch.where(first <= 0, slope, torch.ones_like(slope)))
        return first.mul_(noise) if func is aten.rrelu_with_noise_.default else first * noise
    if func in _NORMALS:
        mean, deviation = args[0], args[1] if len(args) > 1 else 1.0
        tensors = [value for value in (mean, deviation) if isinstance(value, Tensor)]
        shape = torch.broadcast_shapes(*(value.shape for value in tensors))
        fill = lambda made, by: made.normal_(generator=by)  # noqa: E731
        drawn = draw(func, tuple(shape), tensors[0].dtype, fill).to(tensors[0].device)
        return mean + deviation * drawn
    raise refusal(func, "it is not among the operations that Spartito can divide")


def _uniform(made: Tensor, generator: torch.Generator) -> Tensor:
    return made.uniform_(generator=generator)
