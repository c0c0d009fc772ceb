"""What a model consists of: its layers, their output shapes and their parameters, as text."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from spartito.engine.updates.optimizers import whole_shape
from spartito.errors import UserError
from spartito.names import aligned
from spartito.training.fitting.train_modes import evaluating

Shapes = Mapping[str, str]


@dataclass(frozen=True)
class Count:
    """Numbers that learn, and those that do not; ``unknown`` tensors wait for the first batch."""

    trainable: int = 0
    fixed: int = 0
    unknown: int = 0

    @property
    def total(self) -> int:
        """Both of them."""
        return self.trainable + self.fixed

    def __add__(self, other: Count) -> Count:
        return Count(
            self.trainable + other.trainable,
            self.fixed + other.fixed,
            self.unknown + other.unknown,
        )


@dataclass(frozen=True)
class Layer:
    """A module with parameters of its own or without children; ``shape`` is that of its output."""

    name: str
    kind: str
    count: Count
    shape: str = ""


@dataclass(frozen=True, repr=False)
class Summary:
    """The layers of a model in the order in which it holds them; its ``str`` is a table."""

    model: str
    layers: tuple[Layer, ...]

    @property
    def count(self) -> Count:
        """The sum over all layers."""
        return sum((layer.count for layer in self.layers), Count())

    @property
    def trainable(self) -> int:
        """How many numbers an optimizer changes."""
        return self.count.trainable

    @property
    def fixed(self) -> int:
        """Frozen parameters and statistics."""
        return self.count.fixed

    @property
    def totals(self) -> str:
        """One line: parameters and statistics, how many are trainable and how many are not."""
        count = self.count
        line = (
            f"{count.total:,} parameters and statistics = "
            f"{count.trainable:,} trainable + {count.fixed:,} not"
        )
        if count.unknown:
            line += f"; {count.unknown} more get their size from the first batch"
        return line

    def __str__(self) -> str:
        rows = [
            (layer.name, layer.kind, layer.shape, _number(layer.count)) for layer in self.layers
        ]
        heads = ("layer", "type", "output shape", "parameters")
        return "\n".join([self.model, *_table(heads, rows), self.totals])

    def __repr__(self) -> str:
        return f"<Summary of {self.model}: {self.totals}>"


def summary(model: nn.Module, example: Any = None) -> Summary:
    """Print the layers of a model and how many numbers they hold.

    A statistic is a number that the model saves and no optimizer changes: BatchNorm's running
    mean and variance count, its integer counter of batches does not. Shared parameters count
    once, where they come first.

    Args:
        model: The module; it is left as it was.
        example: What the model takes, or the size of a tensor as ``(1, 3, 180, 180)``: adds
            output shapes, for which the model computes once. None: without them.

    Returns:
        The same as an object.

    Raises:
        UserError: The model does not take the example.
    """
    found = summarize(model, example)
    print(found)
    return found


def summarize(model: nn.Module, example: Any = None) -> Summary:
    """The layers of ``model`` and its counts.

    ``example`` adds the output shapes: a tensor, a tuple of tensors or a dict of named ones as
    the model takes them, or the size of a tensor as a tuple of ints, ``(1, 3, 180, 180)``. The
    model computes once for that, in evaluation mode, and is left as it was.

    A statistic is a number that the model saves and no optimizer changes: BatchNorm's running
    mean and variance count, its integer counter of batches does not. Shared parameters count
    once, where they come first. Lazy parameters are counted as unknown until a first batch, or
    ``example``, gives them a size. An ``example`` that the model does not take is a `UserError`.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    shapes: Shapes = {}
    if example is not None:
        if any(is_lazy(tensor) for tensor in model.parameters()):
            model = copy.deepcopy(model)  # the computation gives lazy parameters their size
        shapes = _output_shapes(model, example)
    return Summary(type(model).__name__, tuple(_layers(model, shapes)))


def _layers(model: nn.Module, shapes: Shapes) -> Iterator[Layer]:
    seen: set[int] = set()
    for name, module in _rows(model):
        own: list[tuple[Tensor, bool]] = [
            *((tensor, tensor.requires_grad) for tensor in module.parameters(recurse=False)),
            *((tensor, False) for tensor in _statistics(module)),
        ]
        count = Count()
        for tensor, trainable in own:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                count += _count(tensor, trainable)
        yield Layer(name or "(model)", type(module).__name__, count, shapes.get(name, ""))


def _rows(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        own = any(True for _ in module.parameters(recurse=False)) or bool(_statistics(module))
        if own or not any(True for _ in module.children()):
            yield name, module


def _statistics(module: nn.Module) -> list[Tensor]:
    return [
        tensor
        for name, tensor in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
        and (tensor.is_floating_point() or tensor.is_complex())
    ]


def _count(tensor: Tensor, trainable: bool) -> Count:
    if is_lazy(tensor):
        return Count(unknown=1)
    numel = math.prod(whole_shape(tensor))  # of which a task may have less
    return Count(trainable=numel) if trainable else Count(fixed=numel)


def _output_shapes(model: nn.Module, example: Any) -> Shapes:
    """The shape of the first output of each module by name, from one computation."""
    shapes: dict[str, str] = {}

    def note(name: str, output: Any) -> None:
        shapes.setdefault(name, _shape(output))

    handles = [
        module.register_forward_hook(lambda _m, _i, output, name=name: note(name, output))
        for name, module in model.named_modules()
    ]
    try:
        with evaluating(model), torch.random.fork_rng():
            _call(model, example)
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, UserError) as error:
        raise UserError(
            f"an example {_shape(example)} that {type(model).__name__} does not take: {error}",
            "Give an example of what the model's forward takes, or none.",
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return shapes


def _call(model: nn.Module, example: Any) -> None:
    if isinstance(example, Mapping):
        model(**example)
    elif isinstance(example, Tensor):
        model(example)
    elif example and all(isinstance(size, int) for size in example):
        model(torch.zeros(tuple(example), **_like(model)))
    else:
        model(*example)


def _like(model: nn.Module) -> dict[str, Any]:
    for tensor in model.parameters():
        if tensor.is_floating_point():
            return {"dtype": tensor.dtype, "device": tensor.device}
    return {}


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_shape(one)}" for name, one in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(_shape(one) for one in value) + "]"
    return str(value) if isinstance(value, int) else type(value).__name__


def _number(count: Count) -> str:
    if count.unknown:
        return f"{count.total:,} + ?" if count.total else "?"
    return f"{count.total:,}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned lines, numbers in the last column to the right; a column without a word goes."""
    kept = [at for at in range(len(heads)) if any(row[at] for row in rows)] if rows else []
    lines = [[heads[at] for at in kept], *([row[at] for at in kept] for row in rows)]
    head, *rest = aligned(lines, right=(len(kept) - 1,))
    rule = "-" * max(map(len, (head, *rest)))
    return [rule, head, rule, *rest, rule]
