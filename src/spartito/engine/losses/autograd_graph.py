"""What the graph that autograd keeps for gradients says of a tensor: what made it, and of what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spartito.accelerators import exact
from spartito.errors import UserError

Node = Any
"""A node of torch's graph: its class and ``_saved_...`` attributes are torch's, and not typed."""

MOST_NODES = 4096
STEPS = 12
"""So many operations below a reduction are looked at."""
_MOST_COMPARED = 64


def kinds(names: str) -> frozenset[str]:
    """Kinds of nodes, by the names that torch gives them."""
    return frozenset(f"{name}Backward{number}" for name in names.split() for number in range(5))


def kind_of(node: Node) -> str:
    """What torch calls the operation, as ``MulBackward0``."""
    return type(node).__name__


def parents(node: Node) -> list[Node]:
    """What computed the inputs of ``node``, without those that need no gradient."""
    return [parent for parent, _ in node.next_functions if parent is not None]


def first_parent(node: Node) -> Node | None:
    """What computed the first input of ``node``, if that needs a gradient."""
    return next(iter(parents(node)), None)


def descent(node: Node | None) -> Iterator[Node]:
    """``node``, its first parent, the first one of that, and so on: `STEPS` nodes at most."""
    for _ in range(STEPS):
        if node is None:
            return
        yield node
        node = first_parent(node)


def shape_of(node: Node) -> tuple[int, ...]:
    """The shape of what ``node`` computed."""
    return tuple(node._input_metadata[0].shape)


def signed(number: int) -> int:
    """A dim or an index that torch shows without its sign."""
    return number - (1 << 64) if number >= 1 << 63 else number


LINEAR = kinds(
    "Add Alias Cat Clone Expand NanToNum Neg ReshapeAlias Rsub Squeeze Stack Sub ToCopy "
    "UnsafeView Unsqueeze View Where"
)
"""Of scalars."""

_OF_MESHES = frozenset(f"_{name}Backward" for name in ("Along", "Enter", "EnterLeaf", "Reduce"))
"""What tasks that share a tensor do with it (`mesh.collectives`)."""

_UNBENT = LINEAR | _OF_MESHES | kinds("MaskedFill Permute T Transpose")
"""Sums of their inputs, each times a number."""

SAME_ELEMENTS = kinds(
    "Abs Add BinaryCrossEntropy BinaryCrossEntropyWithLogits Clamp ClampMax ClampMin Clone "
    "Div Exp Expand HuberLoss Log Log1P LogCosh LogSigmoid MaskedFill Maximum Minimum MseLoss "
    "Mul Neg NllLoss NllLoss2D Pow Relu ReshapeAlias Rsub Sigmoid SmoothL1Loss Softplus Sqrt "
    "Square Sub Tanh ToCopy UnsafeView View Where Xlogy"
)
"""Of elements, each for itself."""

ROWS = kinds("Gather LinalgVectorNorm LogSoftmax Mean Norm Softmax Squeeze Sum Unsqueeze")
"""Of rows, each for itself."""

_OVER_DIMS = kinds(
    "Amax Amin Cumsum Kthvalue LinalgVectorNorm LogSoftmax Logsumexp Max Mean Median Min Nansum "
    "Norm Prod Softmax Sort Std Sum Topk Var"
)
"""Of all elements along some dims, or (without ``_saved_dim``) along all of them."""

_SUMS = kinds("Mean Nansum Sum")
_PRODUCTS = kinds("Cdist Dot EuclideanDist Mm")

_OF_PARAMETERS = _OF_MESHES | kinds(
    "Abs Add Cat Clamp ClampMin Clone Div Exp LinalgVectorNorm Log LogSoftmax Mean Mm Mul Neg "
    "Norm Permute Pow Relu ReshapeAlias Rsub Select Sigmoid Softmax Softplus Sqrt Square Squeeze "
    "Stack Sub Sum T Tanh ToCopy Transpose Unsqueeze View"
)
_OF_TWO = kinds("Add Div Mm Mul Sub")
_PICKS = frozenset(("SelectBackward0", "UnbindBackward0", "SliceBackward0"))


def of_parameters_alone(node: Node) -> bool:
    """Whether nothing but parameters went into what ``node`` computed, as into a penalty."""
    seen, waiting = {id(node)}, [node]
    while waiting:
        each = waiting.pop()
        kind = kind_of(each)
        if kind == "AccumulateGrad":
            if not isinstance(each.variable, nn.Parameter):
                return False  # an output whose graph begins here
            continue
        if kind not in _OF_PARAMETERS or len(seen) > MOST_NODES:
            return False
        above = parents(each)
        if kind in _OF_TWO and len(above) == 1 and not _is_scaled(each, kind, above[0]):
            return False
        for parent in above:
            if id(parent) not in seen:
                seen.add(id(parent))
                waiting.append(parent)
    return True


def _is_scaled(node: Node, kind: str, parent: Node) -> bool:
    """Whether the other operand was a number, or (an anchor) a tensor like the parameter."""
    if kind in ("MulBackward0", "DivBackward0"):
        other = node._saved_other if node._saved_other is not None else node._saved_self
        return other is not None and not other.dim()
    return kind in ("AddBackward0", "SubBackward0") and shape_of(node) == shape_of(parent)


def factor(node: Node) -> Tensor | None:
    """What a product multiplies by without learning it; None for other operations."""
    if kind_of(node) != "MulBackward0":
        return None
    left, right = (parent for parent, _ in node.next_functions)
    if left is not None and right is not None:
        return None
    found: Tensor = node._saved_self if left is None else node._saved_other
    return found


def is_of_one(node: Node, size: int) -> bool:
    """Whether a loss is that of one example, which was picked from the batch."""
    for each in descent(first_parent(node)):
        kind = kind_of(each)
        if kind in _PICKS:
            whole = shape_of(parents(each)[0])
            dim = signed(getattr(each, "_saved_dim", 0))
            return dim in (0, -len(whole)) and whole[:1] == (size,)
        if kind not in SAME_ELEMENTS and kind not in ROWS:
            break
    return False


def stacks_scalars(node: Node) -> bool:
    """Whether a vector was made of scalars that were put together: losses, not elements.

    Each may have a weight of its own since, or one that is learned.
    """
    for _ in range(STEPS):
        kind, above = kind_of(node), parents(node)
        if kind == "StackBackward0":
            return all(not shape_of(parent) for parent in above)
        if kind == "CatBackward0":
            return all(kind_of(p) in LINEAR and not shape_of(parents(p)[0]) for p in above)
        if kind not in SAME_ELEMENTS:
            break
        if len(above) > 1:
            above = [parent for parent in above if not of_parameters_alone(parent)]
        if not above:
            break
        node = above[0]
    return False


def row_dim(shape: Sequence[int], size: int) -> int | None:
    """The dim of ``shape`` that has the examples, or those times something."""
    if size in shape:
        return shape.index(size)
    return 0 if shape and shape[0] and shape[0] % size == 0 else None


def reduces_rows(node: Node, size: int) -> bool:
    """Whether ``node`` reduces the dim of the examples, perhaps among others."""
    above = parents(node)
    before = shape_of(above[0]) if above else ()
    rows = row_dim(before, size)
    if rows is None:
        return False
    dims = getattr(node, "_saved_dim", None)
    if dims is None or dims == ():
        return True
    found = dims if isinstance(dims, tuple) else (dims,)
    return any(signed(dim) % len(before) == rows for dim in found)


def compares_rows(nodes: list[Node], size: int) -> bool:
    """Whether what ``nodes`` computed is no longer that of each example for itself.

    As far as the next layers of the model, whose operations are not looked into.
    """
    if size < 2:
        return False
    waiting, seen = [(node, False) for node in nodes], set[int]()
    while waiting and len(seen) < _MOST_COMPARED:
        node, bent = waiting.pop()
        kind, above = kind_of(node), parents(node)
        seen.add(id(node))
        if kind in _PRODUCTS:
            if len(above) > 1 and not any(map(of_parameters_alone, above)):
                return True
            continue
        if kind in _OVER_DIMS:
            bends = bent or kind not in _SUMS
            if bends and reduces_rows(node, size) and not of_parameters_alone(node):
                return True
        elif kind not in SAME_ELEMENTS and kind not in ROWS and kind not in _UNBENT:
            continue
        elif len(above) > 1 and _is_every_pair(shape_of(above[0]), shape_of(above[1]), size):
            return True
        bent = bent or not (kind in _UNBENT or kind in _SUMS or _scales(kind, above))
        waiting += [(parent, bent) for parent in above if id(parent) not in seen]
    return False


def _scales(kind: str, above: list[Node]) -> bool:
    return len(above) == 1 and kind.startswith(("MulBackward", "DivBackward"))


def _is_every_pair(left: tuple[int, ...], right: tuple[int, ...], size: int) -> bool:
    """Whether ``(n, 1)`` meets ``(1, n)``: each example each other one."""
    both = list(zip(reversed(left), reversed(right), strict=False))
    return (size, 1) in both and (1, size) in both and (size, size) not in both


def refuse_pairs(shape: tuple[int, ...], before: tuple[int, ...], size: int) -> None:
    """Refuse an output ``(n, 1)`` that a target ``(n,)`` made ``(n, n)``, or the other way."""
    if size > 1 and shape == (size, size) and before in ((size, 1), (size,)):
        other = (size,) if before == (size, 1) else (size, 1)
        raise UserError(
            f"a loss that compares each output with every target: {before} against {other} "
            f"makes {shape}",
            "Give both one shape: target.view_as(output), or output.squeeze(1).",
        )


def masks(node: Node) -> Iterator[tuple[Tensor, Tensor]]:
    """The factors of elements that are added up, masks or weights, each with its sum.

    Args:
        node: What computed the elements.
    """
    whole: Tensor | None = None
    for each in descent(node):
        kind, mask = kind_of(each), factor(each)
        if mask is not None:
            if mask.dim():
                yield mask, mask.sum(dtype=exact(mask))
                shape = shape_of(each)
                if whole is not None or mask.shape != shape:
                    whole = mask if whole is None else whole * mask
                    yield whole, whole.expand(shape).sum(dtype=exact(whole))
                whole = mask if whole is None else whole
        elif kind == "MaskedFillBackward0":
            yield each._saved_mask, (~each._saved_mask).sum()
        elif kind == "WhereBackward0":
            condition = each._saved_condition
            yield condition, condition.sum()
            yield condition, (~condition).sum()
        elif kind.startswith("CtcLossBackward"):
            lengths = torch.as_tensor(each._saved_target_lengths)
            yield lengths, lengths.sum()
            return
        elif kind not in SAME_ELEMENTS:
            return
