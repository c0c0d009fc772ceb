"""Random numbers in a forward pass that are those of the global batch, however it is split.

A dispatch mode sees every random operation of torch, whichever module, function or C++ code makes
it. Each takes a key from torch's own generator, which is seeded for (seed, step, forward pass);
the key draws for the global batch, of which this replica takes its rows. Activation checkpointing
puts that generator back, so its second pass takes the same keys.

Which dim holds the examples is measured where it matters: the forward pass is made with two and
with three rows, and a dim that grows with them is the one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from spartito.engine.context import StepContext, current, enter
from spartito.errors import UserError

aten = torch.ops.aten
Fill = Callable[[Tensor, torch.Generator], object]
Shape = tuple[int, ...]
PROBES = (2, 3)  # rows; two sizes that no constant dim can follow


@dataclass(frozen=True, slots=True)
class Rows:
    """How a random tensor holds the examples: ``each`` rows for each along ``dim``.

    ``dim`` None: it does not hold them, and is the same on all replicas. ``others`` are its other
    dims.
    """

    dim: int | None
    each: int
    others: Shape

    def fits(self, shape: Shape, size: int) -> bool:
        """Whether a tensor for ``size`` examples has this shape."""
        if self.dim is None:
            return shape == self.others
        rest = shape[: self.dim] + shape[self.dim + 1 :]
        return rest == self.others and shape[self.dim] == size * self.each


@dataclass
class _Pass:
    """One forward pass of a model, with all that is needed to make it again with other rows."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: StepContext
    seed: int
    before: Tensor  # the state of torch's generator
    made: int = 0  # random operations so far
    packed: bool = False
    inside: int = 0  # calls of the same module in this one
    mode: TorchDispatchMode | None = None


_active: _Pass | None = None
_replays = False


class GlobalRandomness:
    """Gives a model one device's random numbers in every training step; see `globalize`."""

    def __init__(self) -> None:
        self.made = 0
        """Random operations since the last `check`, on this replica."""
        self._idle = False
        self._known: dict[tuple[int, Any], Rows] = {}

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward pass."""
        global _active
        context = current()
        if _active is not None:
            _active.inside += _active.module is module
            return
        if context is None or not module.training:
            return
        if _replays:
            raise UserError(
                "a whole model in torch.utils.checkpoint, deterministic",
                "Use checkpoint() for parts inside of the model.",
            )
        context.calls += 1
        self._idle = self._idle or not len(context.offsets)
        seed = _seed(context.seed, context.step, context.calls)
        before = torch.default_generator.get_state()
        _active = _Pass(module, args, kwargs, context, seed, before)
        _active.mode = _Drawing(self, _active)
        torch.default_generator.manual_seed(seed)
        _active.mode.__enter__()  # type: ignore[no-untyped-call]

    def end(self, module: nn.Module, *_: object) -> None:
        """After it."""
        global _active
        if _active is None or _active.module is not module or _active.mode is None:
            return
        if _active.inside:
            _active.inside -= 1
            return
        _active.mode.__exit__(None, None, None)
        torch.default_generator.set_state(_active.before)
        _active = None

    def piggybacked(self) -> tuple[float, float]:
        """What `check` has to hear from all replicas, summed; those without rows abstain."""
        return (0.0, 0.0) if self._idle else (float(self.made), 1.0)

    def check(self, total: Sequence[float]) -> None:
        """Refuse forward passes that drew more often on one replica than on another."""
        made, abstained, self.made, self._idle = self.made, self._idle, 0, False
        if not abstained and total[0] != made * total[1]:
            raise UserError(
                f"{made} random operations here, another number on other replicas, deterministic",
                "Draw equally often for all rows, or leave deterministic=True out.",
            )

    def rows(self, func: Any, shape: Shape, now: _Pass) -> Rows:
        """How a random tensor that ``func`` is about to draw holds the examples."""
        size, key = len(now.context.offsets), (now.made, func)
        found = self._known.get(key)
        if found is None or not found.fits(shape, size):
            plan = _measure(now)
            self._known |= {
                (number, made): rows for number, (made, rows) in enumerate(plan) if rows
            }
            found = self._known.get(key) if now.made < len(plan) else None
            if found is None or not found.fits(shape, size):
                raise _refusal(func, f"a shape {shape} that does not tell which dim has the rows")
        if found.each > 1 and now.packed:
            raise _refusal(func, "packed sequences: their rows are ordered by time")
        return found


def globalize(model: nn.Module) -> GlobalRandomness:
    """Have all random operations of ``model`` draw for the global batch inside of a step."""
    before = model.__dict__.get("_spartito_randomness")
    if isinstance(before, GlobalRandomness):  # prepared before
        return before
    found = model.__dict__["_spartito_randomness"] = GlobalRandomness()
    model.register_forward_pre_hook(found.begin, with_kwargs=True)
    model.register_forward_hook(found.end, always_call=True)
    return found


@contextmanager
def replaying() -> Iterator[None]:
    """A backward pass, in which checkpointing computes parts of the forward pass again."""
    global _replays
    _replays = True
    try:
        with _Drawing(None, None):
            yield
    finally:
        _replays = False


def _seed(*numbers: int) -> int:
    text = " ".join(map(str, numbers)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1


class _Drawing(TorchDispatchMode):
    """Draws by keys: in a forward pass, or (without one) again in the backward pass."""

    def __init__(self, source: GlobalRandomness | None, now: _Pass | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._source, self._now = source, now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_quiet(func, args, kwargs):
            return _random(func, args, kwargs, self.draw)
        if func is aten._pack_padded_sequence.default and self._now is not None:
            self._now.packed = True
        return func(*args, **kwargs)

    def draw(self, func: Any, shape: Shape, dtype: torch.dtype, fill: Fill) -> Tensor:
        """A tensor of ``shape``: the rows that are here of what ``fill`` draws for all."""
        context = current()
        key, generator = _key()
        size = len(context.offsets) if context is not None else 0
        rows: Rows | None = None
        if context is not None and size not in (0, context.global_size):
            rows = context.drawn.get(key)
            if rows is None and (self._source is None or self._now is None):
                raise _refusal(func, "torch.utils.checkpoint with preserve_rng_state=False")
            if rows is None and self._source is not None and self._now is not None:
                rows = context.drawn[key] = self._source.rows(func, shape, self._now)
        if self._now is not None and self._source is not None:
            self._now.made += 1
            self._source.made += 1
        if rows is None or rows.dim is None or context is None:
            return _filled(shape, dtype, fill, generator)
        if func is aten.randperm.default:
            raise _refusal(func, "an order of the examples that are here")
        everyone = list(shape)
        everyone[rows.dim] = context.global_size * rows.each
        drawn = _filled(tuple(everyone), dtype, fill, generator)
        own = context.offsets[:, None] * rows.each + torch.arange(rows.each)
        return drawn.index_select(rows.dim, own.flatten())


class _Recording(TorchDispatchMode):
    """Notes which random operations there are, and draws for the rows that it sees."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[tuple[Any, Shape]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_quiet(func, args, kwargs):
            return _random(func, args, kwargs, self.draw)
        return func(*args, **kwargs)

    def draw(self, func: Any, shape: Shape, dtype: torch.dtype, fill: Fill) -> Tensor:
        self.made.append((func, shape))
        return _filled(shape, dtype, fill, _key()[1])


class RandomnessForbidden(_Recording):
    """Refuses random operations: outside of the model each replica draws for its own rows."""

    def draw(self, func: Any, shape: Shape, dtype: torch.dtype, fill: Fill) -> Tensor:
        """Raise `UserError`."""
        raise _refusal(func, "it is in the loss: draw in the model's forward pass")


def _key() -> tuple[int, torch.Generator]:
    """The next key of torch's generator, and one that draws by it."""
    key = int(torch.randint(1 << 62, ()))
    return key, torch.Generator().manual_seed(key)


def _filled(shape: Shape, dtype: torch.dtype, fill: Fill, generator: torch.Generator) -> Tensor:
    """Drawn on the CPU, so that all kinds of devices draw alike."""
    made = torch.empty(shape, dtype=dtype, device="cpu")
    fill(made, generator)
    return made


def _measure(now: _Pass) -> list[tuple[Any, Rows | None]]:
    """The random operations of a forward pass, and how each holds the examples (None: unclear).

    The pass is made with a few of its rows, and leaves neither buffers nor the generator changed.
    """
    size, context = len(now.context.offsets), current()
    buffers = list(now.module.buffers())
    before = [buffer.clone() for buffer in buffers]
    state = torch.default_generator.get_state()
    made: list[list[tuple[Any, Shape]]] = []

    def passes() -> None:
        for count in PROBES:
            args, kwargs = _shrunk((now.args, now.kwargs), size, count)
            torch.default_generator.manual_seed(now.seed)
            with torch.no_grad(), _Recording() as recording:
                now.module(*args, **kwargs)
            made.append(recording.made)

    enter(None)
    try:
        with ThreadPoolExecutor(1) as aside:  # here we are below autograd, inside of an operation
            aside.submit(passes).result()
    finally:
        enter(context)
        torch.default_generator.set_state(state)
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
    return [
        (func, _compared(small, large) if func is other else None)
        for (func, small), (other, large) in zip(*made, strict=False)
    ]


def _shrunk(inputs: Any, size: int, count: int) -> Any:
    """``inputs`` with ``count`` rows in the tensors that have ``size``."""

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == size:
            return value.detach()[torch.arange(count) % size]
        return value

    leaves = tree_leaves(inputs)
    if all(cut(value) is value for value in leaves):
        raise UserError(
            f"a model that draws at random, and no input of {size} rows, deterministic",
            "Give the model the rows of the batch, the examples in the first dim.",
        )
    return tree_map(cut, inputs)


def _compared(small: Shape, large: Shape) -> Rows | None:
    """How a shape grew from the smaller to the larger number of examples."""
    if small == large:
        return Rows(None, 1, small)
    if len(small) != len(large):
        return None
    grown = [dim for dim in range(len(small)) if small[dim] != large[dim]]
    dim = grown[0]
    each, rest = divmod(small[dim], PROBES[0])
    if len(grown) > 1 or rest or large[dim] != each * PROBES[1]:
        return None
    return Rows(dim, each, small[:dim] + small[dim + 1 :])


def _refusal(func: Any, why: str) -> UserError:
    name = func._schema.name.replace("aten::", "torch's ")
    return UserError(
        f"{name} draws at random, and cannot give one device's numbers: {why}",
        "Leave deterministic=True out, or draw with dropout, torch.rand or torch.randn, the "
        "examples in a dim of their own.",
    )


# What each random operation does with its draw


def _is_quiet(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
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


def _random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], draw: _Draw) -> Any:
    """The result of a random operation whose numbers come from ``draw``."""
    if kwargs.get("generator") is not None:
        raise _refusal(func, "a generator of your own")
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
    if func is aten.native_dropout.default:
        kept = draw(func, tuple(first.shape), torch.float32, _uniform) < 1 - args[1]
        mask = kept.to(first.device)
        return first * mask * (1 / (1 - args[1]) if args[1] < 1 else 0.0), mask
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
    raise _refusal(func, "it is not among the operations that Spartito can divide")


def _uniform(made: Tensor, generator: torch.Generator) -> Tensor:
    return made.uniform_(generator=generator)
