"""Random numbers in a forward pass that are those of the global batch, however it is split.

A dispatch mode sees every random operation of torch, whichever module, function or C++ code makes
it. Each takes a key from torch's own generator, which is seeded for (seed, step, forward pass);
the key draws for the global batch, of which this replica takes its rows. Activation checkpointing
puts that generator back, so its second pass takes the same keys.

Which dim holds the examples is measured where it matters: the forward pass is made with two and
with three rows, and a dim that grows with them is the one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from hashlib import blake2b
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.hooks import RemovableHandle

from spartito.engine.logged import listening
from spartito.engine.modules.row_independence import check_rows
from spartito.engine.modules.trial_passes import rows_of, untouched
from spartito.engine.randomness.keyed_draws import (
    Drawing,
    Draws,
    Fill,
    Recording,
    Shape,
    filled,
    next_key,
    refusal,
)
from spartito.engine.step_context import UNKNOWN, StepContext, current, within
from spartito.errors import UserError

aten = torch.ops.aten
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
    caller: FrameType | None = None  # who calls the module
    plan: list[tuple[Any, Rows | None]] | None = None  # what it draws, once that was measured
    mode: TorchDispatchMode | None = None


_active: _Pass | None = None
_replays = False


def _unseen(method: Callable[..., None]) -> Callable[..., None]:
    """What a method asks torch is not part of the forward pass, which others may follow."""

    @wraps(method)
    def wrapped(*args: Any) -> None:
        with torch._C.DisableTorchFunction():
            method(*args)

    return wrapped


class GlobalRandomness:
    """Gives a model one device's random numbers in every training step; see `globalize`."""

    def __init__(self) -> None:
        self.made = 0
        """Random operations since the last `check`, on this replica."""
        self.ran = False
        """Whether there was a forward pass since then."""
        self.look: Callable[..., Draws] | None = None
        """Tells what a forward pass draws, where calling the model does not."""
        self._idle = self._looked_at_rows = False
        self._row_hook: RemovableHandle | None = None
        self._known: dict[tuple[Any, ...], Rows] = {}

    def watch_rows(self, model: nn.Module) -> None:
        """Have a model refused whose rows see each other: once, before its next forward pass.

        All replicas look at the same pass, as they may meet in it: one of which each has rows.

        Args:
            model: With all hooks of others: they come after this.
        """
        if self._row_hook is None and not self._looked_at_rows:
            hook = model.register_forward_pre_hook(self._look, prepend=True, with_kwargs=True)
            self._row_hook = hook

    def _look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        context = current()
        if context is None or _active is not None or _replays or not module.training:
            return
        replicas = context.collective.world_size
        if self._row_hook is not None and replicas > 1 and context.global_size >= 2 * replicas:
            self._row_hook.remove()
            self._row_hook, self._looked_at_rows = None, True
            check_rows(module, args, kwargs, len(context.offsets))

    @_unseen
    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward pass."""
        global _active
        context = current()
        if _active is not None:
            _active.inside += _active.module is module
            return
        if context is None or not any(part.training for part in module.modules()):
            return
        if _replays:
            raise UserError(
                "a whole model in torch.utils.checkpoint, deterministic",
                "Use checkpoint() for parts inside of the model.",
            )
        context.calls += 1
        self.ran = True
        self._idle = self._idle or not len(context.offsets)
        seed = _seed(context.seed, context.step, context.calls)
        before = torch.default_generator.get_state()
        _active = _Pass(module, args, kwargs, context, seed, before)
        _active.caller = sys._getframe(2)
        _active.mode = _KeyedDrawing(self, _active)
        torch.default_generator.manual_seed(seed)
        _active.mode.__enter__()  # type: ignore[no-untyped-call]

    @_unseen
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
        _active.caller = None  # it has the output, and the graph behind it
        _active = None

    def skip(self, count: int) -> None:
        """In a forward pass, pass over ``count`` operations that draw: another task makes them.

        So does a part of it that is computed again (`replaying`).
        """
        if _active is None and not _replays:
            return
        with _disable_current_modes():
            for _ in range(count):
                next_key()
        if _active is not None:
            _active.made += count
            self.made += count

    def forget(self) -> None:
        """The forward passes since the last `check` count for nothing."""
        self.made, self._idle, self.ran = 0, False, False

    def abstain(self) -> None:
        """There were no rows to draw for."""
        self._idle = True

    def piggybacked(self) -> tuple[float, float]:
        """What `check` has to hear from all replicas, summed; those without rows abstain."""
        return (0.0, 0.0) if self._idle else (float(self.made), 1.0)

    def check(self, total: Sequence[float]) -> None:
        """Refuse forward passes that drew more often on one replica than on another."""
        made, abstained = self.made, self._idle
        self.forget()
        if not abstained and total[0] != made * total[1]:
            raise UserError(
                f"{made} random operations here, another number on other replicas, deterministic",
                "Draw equally often for all rows, or leave deterministic=True out.",
            )

    def measure_again(self) -> None:
        """Forget what was measured: the model may have changed."""
        self._looked_at_rows = False
        self._known.clear()

    def rows(self, func: Any, shape: Shape, now: _Pass) -> Rows:
        """How a random tensor that ``func`` is about to draw holds the examples.

        A shape alone does not tell: of a weight of (4, 4), or of four rows of four features. So
        what was measured holds for the lines of the model that drew then.
        """
        size, key = len(now.context.offsets), (now.made, func, *_lines(now))
        found = self._known.get(key)
        if found is None or not found.fits(shape, size):
            if now.plan is None:
                now.plan = _measure(now, self.look or partial(_look, now.module))
            made, found = now.plan[now.made] if now.made < len(now.plan) else (None, None)
            if found is None or made is not func or not found.fits(shape, size):
                raise refusal(func, f"a shape {shape} that does not tell which dim has the rows")
            self._known[key] = found
        if found.each > 1 and now.packed:
            raise refusal(func, "packed sequences: their rows are ordered by time")
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
        with _KeyedDrawing(None, None):
            yield
    finally:
        _replays = False


def _lines(now: _Pass) -> list[int]:
    """Where the model is: the functions that have called each other, and how far each has come."""
    found: list[int] = []
    frame = sys._getframe(1)
    while frame is not now.caller and frame.f_back is not None:
        found += (id(frame.f_code), frame.f_lasti)
        frame = frame.f_back
    return found


def _seed(*numbers: int) -> int:
    text = " ".join(map(str, numbers)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1


class _KeyedDrawing(Drawing):
    """Draws by keys: in a forward pass, or (without one) again in the backward pass."""

    def __init__(self, source: GlobalRandomness | None, now: _Pass | None) -> None:
        super().__init__()
        self._source, self._now = source, now

    def __torch_dispatch__(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if func is aten._pack_padded_sequence.default and self._now is not None:
            self._now.packed = True
        return super().__torch_dispatch__(func, *args, **kwargs)

    def draw(self, func: Any, shape: Shape, dtype: torch.dtype, fill: Fill) -> Tensor:
        """A tensor of ``shape``: the rows that are here of what ``fill`` draws for all."""
        context = current()
        key, generator = next_key()
        size = len(context.offsets) if context is not None else 0
        rows: Rows | None = None
        if context is not None and size not in (0, context.global_size):
            rows = context.drawn.get(key)
            if rows is None and (self._source is None or self._now is None):
                raise refusal(func, "torch.utils.checkpoint with preserve_rng_state=False")
            if rows is None and self._source is not None and self._now is not None:
                rows = context.drawn[key] = self._source.rows(func, shape, self._now)
        if self._now is not None and self._source is not None:
            self._now.made += 1
            self._source.made += 1
        if rows is None or rows.dim is None or context is None:
            return filled(shape, dtype, fill, generator)
        if func is aten.randperm.default:
            raise refusal(func, "an order of the examples that are here")
        if size and int(context.offsets[0]) == UNKNOWN:
            raise refusal(
                func,
                "a collate function left out examples, and does not say which (raise "
                "spartito.CorruptSampleError in __getitem__ instead)",
            )
        everyone = list(shape)
        everyone[rows.dim] = context.global_size * rows.each
        drawn = filled(tuple(everyone), dtype, fill, generator)
        own = context.offsets[:, None] * rows.each + torch.arange(rows.each)
        return drawn.index_select(rows.dim, own.flatten())


class RandomnessForbidden(Drawing):
    """Refuses random operations: outside of the model each replica draws for its own rows."""

    def draw(self, func: Any, shape: Shape, dtype: torch.dtype, fill: Fill) -> Tensor:
        """Raise `UserError`."""
        raise refusal(func, "it is in the loss: draw in the model's forward pass")


def _measure(now: _Pass, look: Callable[..., Draws]) -> list[tuple[Any, Rows | None]]:
    """The random operations of a forward pass, and how each holds the examples (None: unclear).

    The pass is made with a few of its rows, and leaves the model and the generators as they were.
    """
    size = len(now.context.offsets)
    made: list[Draws] = []

    def passes() -> None:
        for count in PROBES:
            given = rows_of((now.args, now.kwargs), size, count)
            if given is None:
                raise UserError(
                    f"a model that draws at random, and no input of {size} rows, deterministic",
                    "Give the model the rows of the batch, the examples in the first dim.",
                )
            args, kwargs = given
            with untouched(now.module), torch.no_grad(), warnings.catch_warnings():
                torch.default_generator.manual_seed(now.seed)
                # Of reentrant checkpointing, which takes it for a training without gradients.
                warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
                made.append(look(*args, **kwargs))

    # Here we are below autograd, inside of an operation.
    with within(None), ThreadPoolExecutor(1) as aside:
        aside.submit(passes).result()
    return [
        (func, _compared(small, large) if func is other else None)
        for (func, small), (other, large) in zip(*made, strict=False)
    ]


def _look(module: nn.Module, *args: Any, **kwargs: Any) -> Draws:
    with Recording() as recording, listening(None):  # of a trial nobody wants figures
        module(*args, **kwargs)
    made: Draws = recording.made
    return made


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
