"""One stage of a model: forward and backward passes of microbatches, with what others made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spartito.engine.logged import Listener, hearing, listening
from spartito.engine.randomness.global_randomness import replaying
from spartito.engine.step_context import StepContext, within
from spartito.errors import UserError
from spartito.mesh.sharded_tensor import TABLE, Sharded, all_whole, as_it_is, here_of
from spartito.pipeline.cut import Cut
from spartito.pipeline.microbatches import each_tensor
from spartito.pipeline.recomputation import passing
from spartito.pipeline.replay import Reached, Replay

Call = Callable[[], Any]
"""A forward pass of the whole model with the data of one microbatch."""
Todo = list[Callable[[], None]]
"""Gradients of weights that are still to be computed."""


@dataclass(frozen=True, slots=True)
class Keys:
    """How a microbatch draws the random numbers of one device.

    Args:
        context: Makes what a pass of a stage belongs to, with the rows that are in it.
        skip: Passes over so many draws of earlier stages.
    """

    context: Callable[[], StepContext]
    skip: Callable[[int], None]


@dataclass
class Passed:
    """A microbatch that went through a stage.

    Attributes:
        sent: What the next stage gets; of a tensor that is cut this task's shard.
        output: What the model returned, in the last stage.
        entrance: Keeps the gradients of what came.
        context: What it belonged to; None where random numbers are a task's own.
        todo: Gradients of weights that were put off.
    """

    sent: list[Tensor]
    output: Any
    entrance: Entrance
    context: StepContext | None = None
    todo: Todo = field(default_factory=list)

    def backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Add to the gradients of the parameters.

        Args:
            roots: The tensors whose gradients are known: those sent that learn, or the loss. Of one
                that learns only behind this stage, as it is written into there, nothing came here.
            gradients: Their gradients.

        Returns:
            The gradients of what came and learns.
        """
        both = zip(roots, gradients, strict=True)
        known = [(root, gradient) for root, gradient in both if root.requires_grad]
        if known:
            learning, came = map(list, zip(*known, strict=True))
            try:
                with nullcontext() if self.context is None else _drawing_again(self.context):
                    torch.autograd.backward(learning, came)
            except RuntimeError as error:
                if "meta" not in str(error):
                    raise
                raise UserError(
                    "the backward pass of a stage came to a tensor of an earlier stage",
                    "Where a stage begins in torch.utils.checkpoint, it needs use_reentrant=False: "
                    "set that, or begin the stage elsewhere by split=[...].",
                ) from error
        return self.entrance.gradients()

    def weights(self) -> None:
        """Compute the gradients of weights that were put off."""
        with torch.no_grad():
            for compute in self.todo:
                compute()
        self.todo.clear()


@contextmanager
def _drawing_again(context: StepContext) -> Iterator[None]:
    with within(context), replaying():
        yield


class Entrance:
    """What came from the stage before, as the leaves of this stage's graph.

    Args:
        received: The tensors.
        learns: Which of them have gradients.
    """

    def __init__(self, received: Sequence[Tensor], learns: Sequence[bool]) -> None:
        self._came, self._learns = list(received), list(learns)
        self._found: Sequence[Tensor | None] = [None] * len(self._came)

    def enter(self) -> list[Tensor]:
        """The tensors, of which operations in place may be made too."""
        if not (torch.is_grad_enabled() and any(self._learns)):
            return self._came
        anchor = torch.empty(0, requires_grad=True, device=self._came[0].device)
        return list(_Enter.apply(anchor, self))  # type: ignore[no-untyped-call]

    def take(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep what backward brought."""
        self._found = gradients

    def gradients(self) -> list[Tensor]:
        """The gradient of each tensor that learns; zeros for one that was not used."""
        both = zip(self._came, self._learns, self._found, strict=True)
        found = [torch.zeros_like(t) if g is None else g for t, learns, g in both if learns]
        self._came, self._found, self._learns = [], [], []
        return found


class _Enter(torch.autograd.Function):
    """The first node of a stage's graph. Its tensors are no leaves, so they can be written."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, entrance: Entrance) -> tuple[Tensor, ...]:
        ctx.entrance = entrance
        ctx.set_materialize_grads(False)
        both = zip(entrance._came, entrance._learns, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, learns in both if not learns))
        return tuple(entrance._came)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.entrance.take(gradients)
        return None, None


def run(
    cut: Cut,
    stage: int,
    received: Sequence[Tensor],
    call: Call,
    keys: Keys | None = None,
    later: bool = False,
) -> Passed:
    """The forward pass of a microbatch through a stage.

    Args:
        cut: The program and its stages.
        stage: Which of them.
        received: What came from the stage before.
        call: Makes the model's forward pass.
        keys: How it draws at random; None: as this task does.
        later: Whether gradients of weights are put off.

    Returns:
        What came of it.
    """
    program, (begin, end) = cut.program, cut.part(stage)
    enters = cut.enters(stage)
    entrance = Entrance(received, [value.tensor.requires_grad for value in enters])
    came = [id(value.tensor) for value in enters]
    cut_alike = (as_it_is(t, v.tensor) for t, v in zip(entrance.enter(), enters, strict=True))
    known = dict(zip(came, cut_alike, strict=True))
    leaves = [] if stage == cut.stages - 1 else cut.enters(stage + 1)
    wanted = [id(value.tensor) for value in leaves]
    passed = Passed([], None, entrance, None if keys is None else keys.context())
    instead = _putting_off(passed.todo) if later else None
    skip = None if keys is None else keys.skip
    replay = Replay(program, begin, end, known, wanted, cut.swaps(stage), skip, instead)
    reports = hearing(partial(_heard, replay)) if stage == cut.stages - 1 else listening(None)
    drawing = nullcontext() if passed.context is None else within(passed.context)
    try:
        with reports, drawing, passing(replay):
            output = call()
    except Reached:
        output = None
    if stage == cut.stages - 1:
        passed.output = all_whole(each_tensor(output, replay.swap))
    passed.sent = [here_of(known[key]) for key in wanted]
    return passed


def _heard(replay: Replay, listener: Listener) -> Listener:
    """Takes what the last stage reports; values of earlier ones have come, or are refused."""

    def take(name: str, value: Any, count: Any) -> None:
        value, count = replay.swap(value), replay.swap(count)
        if any(isinstance(each, Tensor) and each.is_meta for each in (value, count)):
            raise UserError(
                f"sp.log({name!r}, ...) of a value in a stage of a pipeline that is not the last",
                "Report it in the last layers or in the loss, which one task sees of each batch.",
            )
        with replay.paused():
            listener(name, value, count)

    return take


def _putting_off(todo: Todo) -> Callable[..., Any]:
    """Computes layers so that backward leaves the gradients of their weights to be done."""

    def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gradient = _WEIGHTS.get(func)
        if gradient is None or kwargs or len(args) < 2:
            return NotImplemented
        if torch.is_autocast_enabled(here_of(args[1]).device.type):
            return NotImplemented

        def local(*args: Any) -> Any:
            weight, given = args[1], [each for each in args[1:3] if isinstance(each, Tensor)]
            if not (torch.is_grad_enabled() and weight.requires_grad):
                return func(*args)
            if not all(each.is_leaf for each in given):
                return func(*args)  # what they are made of has gradients too
            if any(each._backward_hooks for each in given):
                return func(*args)  # torch calls hooks of parameters that it reaches itself
            return _Later.apply(todo, func, gradient, *args)  # type: ignore[no-untyped-call]

        cut = any(isinstance(each, Sharded) for each in args)
        return TABLE[func](local, *args) if cut else local(*args)

    return compute


def _of_linear(
    came: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Callable[[], Tensor], Callable[[], tuple[Tensor, Tensor | None]]]:
    flat = came.reshape(-1, came.shape[-1])

    def weights() -> tuple[Tensor, Tensor | None]:
        rows = x.reshape(-1, x.shape[-1])
        return flat.t() @ rows, None if bias is None else flat.sum(0)

    return lambda: came @ weight, weights


def _of_conv(
    came: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, *options: Any
) -> tuple[Callable[[], Tensor], Callable[[], tuple[Tensor, Tensor | None]]]:
    dims = weight.dim() - 2

    def wide(value: Any) -> list[int]:
        return [value] * dims if isinstance(value, int) else list(value)

    stride, padding, dilation, groups = (*options, *(1, 0, 1, 1)[len(options) :])[:4]
    given = (wide(stride), wide(padding), wide(dilation), False, [0] * dims, groups)
    sizes = None if bias is None else list(bias.shape)

    def backward(mask: list[bool]) -> Any:
        return torch.ops.aten.convolution_backward(came, x, weight, sizes, *given, mask)

    def weights() -> tuple[Tensor, Tensor | None]:
        _, first, second = backward([False, True, bias is not None])
        return first, second

    return lambda: backward([True, False, False])[0], weights


_WEIGHTS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.linear: _of_linear,
    torch.conv1d: _of_conv,
    torch.conv2d: _of_conv,
    torch.conv3d: _of_conv,
}


class _Later(torch.autograd.Function):
    """A layer whose backward pass computes the gradient of its input alone."""

    @staticmethod
    def forward(ctx: Any, todo: Todo, func: Any, gradient: Any, *args: Any) -> Tensor:
        x, *ctx.others = args  # weight and bias as they are: saved ones may come back detached
        ctx.todo, ctx.gradient = todo, gradient
        ctx.save_for_backward(x)
        made: Tensor = func(*args)
        return made

    @staticmethod
    def backward(ctx: Any, came: Tensor) -> Any:
        args = [*ctx.saved_tensors, *ctx.others]
        inputs, weights = ctx.gradient(came, *args)
        ctx.todo.append(lambda: _add(args, *weights()))
        needed = ctx.needs_input_grad[3]
        return (None, None, None, inputs() if needed else None, *[None] * (len(args) - 1))


def _add(args: Sequence[Any], weight: Tensor, bias: Tensor | None) -> None:
    """Add to the gradients of a layer's parameters."""
    for parameter, gradient in zip(args[1:3], (weight, bias), strict=False):
        if gradient is None or parameter is None or not parameter.requires_grad:
            continue
        if parameter.grad is None:  # laid out as the parameter, whose update reads both together
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        else:
            parameter.grad.add_(gradient)
