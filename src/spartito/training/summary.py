"""What a model is made of: its layers, and how many numbers it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from spartito.errors import UserError


@dataclass(frozen=True)
class Layer:
    """One line: a module without children, or one that holds parameters of its own."""

    name: str
    kind: str
    output: str
    count: int


@dataclass(frozen=True)
class Summary:
    """The layers and the totals; as text, a table.

    ``trainable`` counts parameters that learn; ``fixed`` those that do not, and statistics such
    as BatchNorm's running mean (its counter of batches is none). Shared ones count once.
    """

    layers: tuple[Layer, ...]
    trainable: int
    fixed: int

    def __str__(self) -> str:
        head = Layer("layer", "type", "output", 0)
        rows = [(layer.name, layer.kind, layer.output) for layer in (head, *self.layers)]
        counts = [
            "parameters",
            *(f"{layer.count:,}" if layer.count else "" for layer in self.layers),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        wide = max(map(len, counts))
        lines = [
            "  ".join(
                [*(f"{t:<{w}}" for t, w in zip(row, widths, strict=True) if w), f"{n:>{wide}}"]
            )
            for row, n in zip(rows, counts, strict=True)
        ]
        rule = "-" * max(map(len, lines))
        total = f"{self.trainable + self.fixed:,} parameters and statistics"
        parts = f"{self.trainable:,} trainable + {self.fixed:,} not"
        return "\n".join([lines[0], rule, *lines[1:], rule, f"{total} = {parts}"])


def summary(model: nn.Module, example: Any = None) -> Summary:
    """Print the layers of ``model`` and its counts, and answer them; see `summarize`."""
    found = summarize(model, example)
    print(found)
    return found


def summarize(model: nn.Module, example: Any = None) -> Summary:
    """The layers of ``model`` and its counts.

    ``example`` is an input (a tensor, or a tuple of them): with it the shape that each layer
    answers is told. Raises `UserError` for a module whose parameters have no shape yet.
    """
    shapes = {} if example is None else _shapes(model, example)
    seen: set[int] = set()
    layers = []
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *_statistics(module)]
        if any(is_lazy(tensor) for tensor in own):
            raise UserError(
                f"the layer {name or type(module).__name__} has no shape yet",
                "Run the model once on an example; then its parameters are known.",
            )
        fresh = [tensor for tensor in own if id(tensor) not in seen]
        seen.update(map(id, fresh))
        if own or not list(module.children()):
            count = sum(tensor.numel() for tensor in fresh)
            layers.append(Layer(name, type(module).__name__, shapes.get(name, ""), count))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(layer.count for layer in layers)
    return Summary(tuple(layers), trainable, total - trainable)


def _statistics(module: nn.Module) -> list[Tensor]:
    return [b for n, b in module.named_buffers(recurse=False) if n != "num_batches_tracked"]


def _shapes(model: nn.Module, example: Any) -> dict[str, str]:
    """The shape of each module's output for ``example``, the batch left out."""
    shapes: dict[str, str] = {}

    def remember(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                shapes[name] = str(tuple(output.shape[1:]))

        return hook

    hooks = [m.register_forward_hook(remember(name)) for name, m in model.named_modules()]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(*example) if isinstance(example, tuple) else model(example)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return shapes
