"""What a layout does to a model, before any step and without any other task.

The collectives of a step are counted, not estimated: a copy of the model without values (on torch's
meta device) makes one forward and backward pass, along axes that count instead of sending.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from spartito.engine.updates.optimizers import whole_shape
from spartito.errors import UserError
from spartito.mesh import placing
from spartito.mesh.collectives import Axis, summing_at_end
from spartito.mesh.layout import Layout
from spartito.mesh.spec import Blocks
from spartito.names import aligned

FLOPS, BANDWIDTH, LATENCY = 3e10, 2e9, 4e-5
"""What warnings assume of a task: operations and bytes a second, seconds of a collective."""


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter or buffer.

    Attributes:
        name: The user's.
        dims: What its dims are called.
        axes: Along which axis each is cut.
        shape: That of the whole tensor.
        nbytes: What this task has of it.
        whole_nbytes: What one device has.
    """

    name: str
    dims: tuple[str, ...]
    axes: tuple[str | None, ...]
    shape: tuple[int, ...]
    nbytes: int
    whole_nbytes: int


@dataclass(frozen=True, slots=True)
class Cost:
    """The collectives of one step that begin in one module.

    Attributes:
        module: Its path; "" is the model itself.
        calls: How many, forward and backward.
        nbytes: Of the tensors that they bring together.
        flops: Operations of the module on one device, forward and backward.
        parts: Among how many tasks they are divided.
    """

    module: str
    calls: int
    nbytes: int
    flops: int = 0
    parts: int = 1

    @property
    def seconds(self) -> float:
        """About how long the collectives take."""
        return self.calls * LATENCY + self.nbytes / BANDWIDTH

    @property
    def saved_seconds(self) -> float:
        """About how much sooner the module is done."""
        return self.flops * (1 - 1 / self.parts) / FLOPS


@dataclass(frozen=True, slots=True)
class Description:
    """What a layout does; ``print`` it.

    Attributes:
        mesh: The sizes of the axes.
        rows: All parameters and buffers.
        costs: The collectives of a step, by module; empty where they could not be counted.
        example: The shapes of what was given to the model, or why nothing could be.
        warnings: What the layout should be changed for.
    """

    mesh: Mapping[str, int]
    rows: Sequence[Row]
    costs: Sequence[Cost] = ()
    example: str = ""
    warnings: Sequence[str] = field(default=())

    @property
    def nbytes(self) -> int:
        """What this task has of the model."""
        return sum(row.nbytes for row in self.rows)

    @property
    def whole_nbytes(self) -> int:
        """What one device has."""
        return sum(row.whole_nbytes for row in self.rows)

    def __str__(self) -> str:
        mesh = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        lines = [f"mesh: {mesh}", ""]
        cells = [("tensor", "dims", "lies along", "bytes here", "of")]
        for row in self.rows:
            along = ", ".join(axis or "-" for axis in row.axes) if any(row.axes) else "whole"
            cells.append(
                (row.name, ", ".join(row.dims), along, f"{row.nbytes:,}", f"{row.whole_nbytes:,}")
            )
        cells.append(("all", "", "", f"{self.nbytes:,}", f"{self.whole_nbytes:,}"))
        lines += aligned(cells, right=(3, 4))
        if self.costs:
            lines += ["", f"collectives of one step, for {self.example}:"]
            counted = [("module", "calls", "bytes")]
            counted += [(c.module or "(model)", str(c.calls), f"{c.nbytes:,}") for c in self.costs]
            total = sum(c.calls for c in self.costs), sum(c.nbytes for c in self.costs)
            counted.append(("all", str(total[0]), f"{total[1]:,}"))
            lines += aligned(counted, right=(1, 2))
        elif self.example:
            lines += ["", f"collectives of one step: {self.example}"]
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])

    def figures(self) -> dict[str, Any]:
        """The same as JSON, for the run folder and its report."""
        return {
            "mesh": dict(self.mesh),
            "tensors": [
                [row.name, list(row.dims), list(row.axes), row.nbytes, row.whole_nbytes]
                for row in self.rows
            ],
            "bytes": [self.nbytes, self.whole_nbytes],
            "collectives": [[c.module, c.calls, c.nbytes] for c in self.costs],
            "example": self.example,
            "warnings": list(self.warnings),
        }


def describe(
    model: nn.Module,
    planned: Mapping[str, placing.Placed],
    layout: Layout,
    example: Any = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> Description:
    """What a plan does to a model; neither is changed.

    Args:
        model: A whole one.
        planned: What `spartito.mesh.placing.plan` returned for it.
        layout: The rules, and the sizes of the axes.
        example: An input, a tuple or a dict of inputs of one task; None tries some that the first
            layer could take.
        loss: What becomes of the output; None: the sum of all its tensors.

    Returns:
        Tables and warnings.
    """
    found = describe_tensors(model, planned, layout)
    costs, said = count(model, planned, layout, example, loss)
    warnings = [*found.warnings, *_too_dear(costs, found.rows)]
    return Description(found.mesh, found.rows, costs, said, warnings)


def describe_tensors(
    model: nn.Module, planned: Mapping[str, placing.Placed], layout: Layout
) -> Description:
    """The part of `describe` that needs no input.

    Args:
        model: A whole one.
        planned: What `spartito.mesh.placing.plan` returned for it.
        layout: The rules, and the sizes of the axes.

    Returns:
        Its tensors, and warnings about them.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    rows = []
    for path, placed in planned.items():
        size = tensors[path].element_size()
        dims = tuple(map(str, placed.dims)) or ("-",) * len(placed.shape)
        local = placed.spec.local_shape(placed.shape, layout.axes)
        here, all_ = math.prod(local) * size, math.prod(placed.shape) * size
        rows.append(Row(path, dims, placed.spec.dims, placed.shape, here, all_))
    warnings = [
        placing.does_not_divide(placed, layout) + "; it stays whole"
        for placed in planned.values()
        if placed.uneven
    ]
    if all(placed.spec.is_replicated for placed in planned.values()):
        warnings.append("no tensor is cut: all tasks of the model compute all of it")
    return Description(dict(layout.axes), rows, warnings=warnings)


def _too_dear(costs: Sequence[Cost], rows: Sequence[Row]) -> Iterator[str]:
    """The modules whose cut costs more time than it saves, and more bytes a step than memory."""
    for cost in costs:
        own = [row for row in rows if cost.module and row.name.rpartition(".")[0] == cost.module]
        saved = sum(row.whole_nbytes - row.nbytes for row in own)
        if saved and cost.nbytes > saved and cost.seconds > cost.saved_seconds:
            yield (
                f"{cost.module}: {cost.nbytes:,} bytes in {cost.calls} collectives of a step take "
                f"about {cost.seconds * 1e3:.2g} ms, and its cut saves {saved:,} bytes of "
                f"parameters and {cost.saved_seconds * 1e3:.2g} ms; "
                f"names={{'{cost.module}.*weight': {(None,) * len(own[0].shape)}, ...}} leaves it "
                "whole"
            )


class _Counted(Axis):
    """An axis of which this is the first task, and the others are not there: it counts."""

    def __init__(self, name: str, layout: Layout, note: Callable[[Tensor], None]) -> None:
        self.name, self.size, self.index = name, layout.axes[name], 0
        self.rows_from = layout.rows_from(name)
        self._note = note

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Counted) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def sum(self, tensor: Tensor) -> Tensor:
        self._note(tensor)
        return tensor.clone(memory_format=torch.contiguous_format)

    def all(self, tensor: Tensor, dim: int, blocks: Blocks = ()) -> Tensor:
        whole = torch.cat([tensor] * self.size, dim)
        self._note(whole)
        return whole

    def sum_own(self, tensor: Tensor, dim: int, blocks: Blocks = ()) -> Tensor:
        self._note(tensor)
        return self.own(tensor, dim, blocks)

    def most(self, tensor: Tensor) -> Tensor:
        self._note(tensor)
        return tensor


class _Axes(dict[str, Axis]):
    """Gives each module axes of its own, so that backward passes count for it too."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout
        self.running = [""]
        self.calls: dict[str, list[int]] = defaultdict(list)

    def __getitem__(self, name: str) -> Axis:
        calls = self.calls[self.running[-1]]
        return _Counted(name, self._layout, lambda t: calls.append(t.numel() * t.itemsize))


def count(
    model: nn.Module,
    planned: Mapping[str, placing.Placed],
    layout: Layout,
    example: Any = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> tuple[list[Cost], str]:
    """Count the collectives of one step.

    Args:
        model: A whole one.
        planned: Where its tensors lie.
        layout: The sizes of the axes.
        example: As for `describe`.
        loss: As for `describe`.

    Returns:
        The modules with collectives, and the shapes of the example, or why nothing was counted.
    """
    tried = [example] if example is not None else list(_examples(model))
    if not tried:
        return [], "give an example of the input, describe(model, x)"
    problem: Exception | None = None
    for one in tried:
        one = _on_meta(one)
        axes = _Axes(layout)
        copied = _without_values(model)
        flops: dict[str, int] = defaultdict(int)
        _follow(copied, axes, flops)
        placing.cut(copied, planned, axes)
        try:
            with torch.enable_grad():
                args, kwargs = _call(one)
                output = copied(*args, **kwargs)
                made = _total(output) if loss is None else loss(output)
                axes.running[:] = [""]
                with summing_at_end():
                    made.backward()
        except Exception as error:  # of a model that wants to see values, or another input
            problem = problem or error
            continue
        costs = [
            Cost(path, len(sizes), sum(sizes), flops[path], _parts(path, planned, layout))
            for path, sizes in axes.calls.items()
            if sizes
        ]
        return costs, _shapes(one)
    text = str(problem).split("\n")[0]
    return [], f"not counted, the model failed without values: {type(problem).__name__}: {text}"


def first_of(model: nn.Module, planned: Mapping[str, placing.Placed], layout: Layout) -> nn.Module:
    """A copy of a model with values, as the first of its tasks has it; the others are not there.

    It computes what that task computes, for a look at the time: what others would add is missing.

    Args:
        model: A whole one.
        planned: Where its tensors lie.
        layout: The sizes of the axes.

    Returns:
        The copy.
    """
    copied = copy.deepcopy(model).train()
    placing.hide(copied)
    placing.cut(copied, planned, _Axes(layout))
    return copied


def _parts(module: str, planned: Mapping[str, placing.Placed], layout: Layout) -> int:
    """Among how many tasks a module is divided."""
    found = 1
    for path, placed in planned.items():
        if path.rpartition(".")[0] == module:
            sizes = [layout.axes[axis] for axis in placed.spec.axes]
            found = max(found, torch.Size(sizes).numel())
    return found


def _without_values(model: nn.Module) -> nn.Module:
    """A copy of a model on torch's meta device; no value is copied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_empty(parameter), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _empty(buffer)
    copied = copy.deepcopy(model, memo).train()
    placing.hide(copied)
    return copied


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty(whole_shape(tensor), dtype=tensor.dtype, device="meta")


def _follow(model: nn.Module, axes: _Axes, flops: dict[str, int]) -> None:
    """Have the axes know which module runs, and count its operations."""

    def follow(path: str, module: nn.Module) -> None:
        each = 0  # operations for one element of the output
        if isinstance(module, nn.Linear | _ConvNd):
            out = module.out_features if isinstance(module, nn.Linear) else module.out_channels
            each = 6 * module.weight.numel() // out

        def end(_: nn.Module, __: Any, output: Any) -> None:
            axes.running.pop()
            if each and isinstance(output, Tensor):
                flops[path] += each * output.numel()

        module.register_forward_pre_hook(lambda *_: axes.running.append(path))
        module.register_forward_hook(end)

    for path, module in model.named_modules():
        follow(path, module)


def _examples(model: nn.Module) -> Iterator[Any]:
    """Inputs that the first layer could take."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            for tokens in (64, 16, 4):
                yield torch.zeros(2, tokens, dtype=torch.int64)
            return
        dtype = next((p.dtype for p in module.parameters()), torch.float32)
        if isinstance(module, nn.Linear):
            yield torch.zeros(2, module.in_features, dtype=dtype)
            yield torch.zeros(2, 16, module.in_features, dtype=dtype)
            return
        if isinstance(module, _ConvNd):
            for size in (64, 224):
                shape = 2, module.in_channels, *[size] * len(module.kernel_size)
                yield torch.zeros(shape, dtype=dtype)
            return


def _on_meta(value: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda one: one.detach().to("meta") if isinstance(one, Tensor) else one, value
    )


def _call(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


def _total(output: Any) -> Tensor:
    """A loss of all that an output has."""
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        output = output["loss"]
    found = torch.utils._pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    leaves = [leaf for leaf in found if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves:
        raise UserError("an output without a gradient", "Give a loss, or freeze less.")
    total: Tensor = sum(leaf.sum() for leaf in leaves)  # type: ignore[assignment]
    return total


def _shapes(example: Any) -> str:
    leaves = torch.utils._pytree.tree_leaves(example)
    shapes = [str(tuple(leaf.shape)) for leaf in leaves if isinstance(leaf, Tensor)]
    return "an input of " + ", ".join(shapes)
