"""Operations on shards against the same on whole tensors: values, and gradients of all operands."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor

from spartito.cluster.resolver import resolve
from spartito.collectives.membership.rendezvous import Rendezvous
from spartito.mesh import Axis, Mesh, Sharded, Spec, shard, spec, whole, wrap
from spartito.mesh.sharded_tensor import Axes, local_of

TOLERANCE = 1e-12


@contextmanager
def axes_of_this_process(
    sizes: dict[str, int], rows_from: float = math.inf
) -> Iterator[dict[str, Axis]]:
    """The axes of a mesh of all processes of the pool."""
    cluster = resolve()
    mesh = Mesh(sizes)
    mesh.check(cluster.world_size)
    with Rendezvous(cluster, torch.device("cpu")) as rendezvous:
        rendezvous.group()
        yield {
            name: Axis(name, rendezvous.group(name, mesh.along(name, cluster.rank)), rows_from)
            for name in mesh.axes
        }


def packed(tensor: Tensor) -> Tensor:
    """An operand whose first dim has three blocks."""
    tensor.blocks = (tensor.shape[0] // 3,) * 3  # type: ignore[attr-defined]
    return tensor


def specs_of(tensor: Tensor, axes: Axes) -> list[Spec]:
    """Every way to cut a tensor along the axes, each axis once."""
    blocks = getattr(tensor, "blocks", ())
    found = []
    for dims in product([None, *axes], repeat=tensor.dim()):
        cut = [axis for axis in dims if axis]
        divides = all(
            axis is None or size % axes[axis].size == 0
            for size, axis in zip(tensor.shape, dims, strict=True)
        )
        if len(cut) == len(set(cut)) and divides:
            found.append(spec(dims))
            if blocks and dims[0]:
                found.append(spec(dims, (), (blocks, *((),) * (tensor.dim() - 1))))
    return found


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a result."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [each for part in value for each in tensors_in(part)]
    return []


def close(got: Tensor, wanted: Tensor) -> bool:
    """Whether they agree to the last digits."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    if not got.is_floating_point():
        return torch.equal(got, wanted)
    return torch.allclose(got, wanted, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def compare(
    function: Callable[..., Any], operands: Sequence[Any], specs: Sequence[Spec | None], axes: Axes
) -> str:
    """What is wrong with ``function`` of operands that are cut so; "" if nothing is."""
    plain = [_leaf(value) for value in operands]
    torch.manual_seed(1)
    wanted = tensors_in(function(*plain))
    local, given = [], []
    for value, cut in zip(operands, specs, strict=True):
        if not isinstance(value, Tensor) or cut is None or cut.is_replicated:
            local.append(_leaf(value))
            given.append(local[-1])
        else:
            local.append(_leaf(local_of(value, cut, axes), value))
            given.append(wrap(local[-1], cut, axes))
    torch.manual_seed(1)
    results = tensors_in(function(*given))
    if len(results) != len(wanted):
        return f"{len(results)} results instead of {len(wanted)}"
    for number, (result, goal) in enumerate(zip(results, wanted, strict=True)):
        if result.shape != goal.shape:
            return f"result {number} of shape {tuple(result.shape)} instead of {tuple(goal.shape)}"
        if result.requires_grad != goal.requires_grad:
            return f"result {number} has requires_grad={result.requires_grad}"
        if not close(got := whole(result.detach()), goal.detach()):
            return f"result {number}: {got} instead of {goal}"
    _backward(wanted)
    _backward(results)
    for number, (value, cut, mine, goal) in enumerate(
        zip(operands, specs, local, plain, strict=True)
    ):
        if not isinstance(value, Tensor) or not goal.requires_grad:
            continue
        if (mine.grad is None) != (goal.grad is None):
            return f"operand {number} has the gradient {mine.grad} instead of {goal.grad}"
        if goal.grad is None:
            continue
        share = goal.grad if cut is None else local_of(goal.grad, cut, axes)
        if not close(mine.grad, share):
            return f"gradient of operand {number}: {mine.grad} instead of {share}"
    return ""


def _backward(results: list[Tensor]) -> None:
    """Weigh every element of the results differently, through a function that is not linear."""
    generator = torch.Generator().manual_seed(2)
    total = torch.zeros((), dtype=torch.float64)
    for result in results:
        if result.requires_grad:
            weights = torch.randn(result.shape, generator=generator, dtype=torch.float64)
            full = whole(result)
            total = total + (torch.sin(full.double()) * weights).sum()
    if total.requires_grad:
        total.backward()


def fixed(tensor: Tensor) -> Tensor:
    """An operand that does not learn, as a buffer."""
    tensor.fixed = True  # type: ignore[attr-defined]
    return tensor


def _leaf(value: Any, near: Any = None) -> Any:
    """A copy of an operand that learns, unless ``near`` (or itself) is fixed."""
    if not isinstance(value, Tensor):
        return value
    made = value.detach().clone()
    learns = made.is_floating_point() and not hasattr(value if near is None else near, "fixed")
    return made.requires_grad_(learns)


def combinations(
    operands: Sequence[Any], axes: Axes, most: int, chance: random.Random
) -> list[tuple[Spec | None, ...]]:
    """Combinations of specs of the operands with something sharded: all, or about so many.

    Each way to cut each operand is among them.
    """
    ways = [specs_of(value, axes) if isinstance(value, Tensor) else [None] for value in operands]
    if math.prod(map(len, ways)) <= most:
        found = list(product(*ways))
    else:
        count = max(most, *map(len, ways))
        columns = [
            [way for _ in range(0, count, len(each)) for way in chance.sample(each, len(each))]
            for each in ways
        ]
        found = list(dict.fromkeys(zip(*(column[:count] for column in columns), strict=True)))
    return [cuts for cuts in found if any(cut and not cut.is_replicated for cut in cuts)]


def failures(
    cases: dict[str, tuple[Callable[..., Any], list[Any]]], axes: Axes, most: int = 400
) -> list[str]:
    """The cases that fail, with their specs; of each about so many combinations."""
    found = []
    for name, (function, operands) in cases.items():
        for cuts in combinations(operands, axes, most, random.Random(name)):
            try:
                wrong = compare(function, operands, cuts, axes)
            except Exception as error:  # another rank may wait for us: it has the same error
                raise AssertionError(
                    f"{name} with {cuts}: {type(error).__name__}: {error}"
                ) from error
            if wrong:
                found.append(f"{name} with {[c and c.dims for c in cuts]}: {wrong}")
    return found


__all__ = ["Sharded", "axes_of_this_process", "compare", "failures", "shard"]
