"""What a scalar loss is a mean over, read from the graph that autograd keeps for its gradient.

A mean of replicas' means is that of all examples only where each counts for what it was divided
by: kept tokens, class weights, a mask. Torch notes these numbers in the graph anyway, so they are
known in every training loop, whoever called the loss function, for some microseconds.

The walk begins at the loss and ends at each reduction that is added to it: a *term*, with the
number that divides it. Below a term it only looks whether examples are compared with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf, isclose, prod
from typing import Any

from torch import Tensor, finfo

from spartito.engine.losses.autograd_graph import (
    LINEAR,
    MOST_NODES,
    ROWS,
    SAME_ELEMENTS,
    Node,
    compares_rows,
    descent,
    factor,
    first_parent,
    is_of_one,
    kind_of,
    masks,
    of_parameters_alone,
    parents,
    reduces_rows,
    refuse_pairs,
    shape_of,
    signed,
    stacks_scalars,
)


@dataclass(frozen=True, slots=True)
class Divisor:
    """What a scalar loss was divided by.

    Attributes:
        weight: The number; a 0-d tensor on the device where the host does not know it.
        doubt: Why means of several replicas make no exact mean; empty where they do.
        is_guess: The doubt is that the graph does not tell; the loss of two halves may.
        is_sum: It is a sum that nothing divided.
        added: What was added to ``weight`` lest it is 0.
        apart: The numbers of its means, where a device has some of them: all are to be equal.
    """

    weight: float | Tensor
    doubt: str = ""
    is_guess: bool = False
    is_sum: bool = False
    added: float = 0.0
    apart: tuple[float | Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class _Term:
    """A reduction that is added to the loss.

    Attributes:
        node: What computed it.
        weight: What divides it; None: nothing does.
        count: What it added up, where ``weight`` is something else.
        is_full: It counts all elements, equally many of each example.
        is_rows: As many as there are examples.
        is_mean: No number says so.
        added: See `Divisor`.
        doubt: What the graph does not tell.
    """

    node: Node
    weight: float | Tensor | None = None
    count: float | None = None
    is_full: bool = False
    is_rows: bool = False
    is_mean: bool = False
    added: float = 0.0
    doubt: str = ""


COMPARES = "a loss that compares examples with each other, or is no mean over them"
"""Doubts are nouns: they begin the error or the warning."""
NOT_A_MEAN = "a loss that adds a sum over the batch to something else"
SEVERAL = "a loss that adds up means over different numbers of items"
UNKNOWN_DIVISOR = "a loss that is a sum over the batch divided by {}, which counts nothing in it"
NORMALIZED = "a loss with weights that were divided by their sum or mean"
OPAQUE = "a loss made by {}, which does not tell what it is divided by"
UNREADABLE = "a loss whose graph cannot be read"
UNTOLD = "a loss of the model's own without a graph, which would tell what it is divided by"

ADVICE = (
    "Return (sum, count): the sum over this batch, and the number of items (or of their weights) "
    "that it is divided by; or one loss per example."
)

ONE = "spartito.one"
"""A note in the graph: a loss of one example, picked from the batch."""

_MEAN, _SUM = 1, 2
"""Torch's numbers of its reductions."""

_SMALL = 1e-3
"""The most that is added to a count lest it is 0."""

_FEW = 2
"""0.5 is rather a factor than 1 over the number of examples."""


@dataclass(frozen=True, slots=True)
class _Reciprocal:
    """1 over a factor: ``sum * (1 / n)``, where that is what was counted."""

    number: float


_Divisors = tuple[float | Tensor | _Reciprocal, ...]
"""What a result is divided by afterwards: factors first, the nearest last."""
_Path = tuple[Node, _Divisors]


def divisor(loss: Tensor, size: int) -> Divisor | None:
    """What a scalar loss over ``size`` examples was divided by.

    Args:
        loss: A scalar.
        size: How many examples it is about.

    Returns:
        None for a mean over examples.

    Raises:
        UserError: An output ``(n, 1)`` met a target ``(n,)``, which makes ``(n, n)`` of them.
    """
    root = loss.grad_fn
    if root is None:
        return None
    terms: list[_Term] = []
    waiting: list[_Path] = [(root, ())]
    try:
        if _is_of_classes(root, size):
            return None
        for _ in range(MOST_NODES):
            if not waiting:
                return _joined(terms, size)
            node, divisors = waiting.pop()
            waiting += _visit(node, divisors, size, terms)
    except (RuntimeError, AttributeError) as error:  # what was saved is gone, or elsewhere
        return Divisor(float(size), f"{UNREADABLE} ({error})", is_guess=True)
    return Divisor(float(size), UNREADABLE, is_guess=True)


def _is_of_classes(root: Node, size: int) -> bool:
    """Whether a loss is torch's own cross entropy of one class for each example, and nothing else.

    The commonest case, in a fraction of the time that the whole walk takes. Whether examples are
    compared is looked at each time: a loop may compute one loss and then another.
    """
    if kind_of(root) != "NllLossBackward0" or root._saved_reduction != _MEAN:
        return False
    if root._saved_target.numel() != size or root._saved_weight is not None:
        return False
    weight = root._saved_total_weight
    if not weight.is_cpu or weight.tolist() != size:
        return False
    return not compares_rows(parents(root), size)


def _joined(terms: list[_Term], size: int) -> Divisor | None:
    if len(terms) == size and all(_is_of_one(term.node, size) for term in terms):
        return None  # a loop over the examples
    divided = _resolved([term for term in terms if term.weight is not None])
    chosen = next((term for term in divided if not term.is_rows), None)
    weight = float(size) if chosen is None or chosen.weight is None else chosen.weight
    for term in divided:
        if term.doubt:
            return Divisor(weight, term.doubt, is_guess=True)
    if len(divided) < len(terms):
        return Divisor(weight, NOT_A_MEAN) if divided else Divisor(0.0, is_sum=True)
    if chosen is None:
        return None if all(term.is_mean for term in divided) else Divisor(weight)
    weights = [term.weight for term in divided if term.weight is not None]
    if len(weights) == 1 or all(term.is_full for term in divided):
        return Divisor(weight, added=chosen.added)
    if any(isinstance(each, Tensor) for each in weights):
        return Divisor(weight, added=chosen.added, apart=tuple(weights))
    return Divisor(weight, "" if all_equal(weights) else SEVERAL, added=chosen.added)


def _is_of_one(node: Node, size: int) -> bool:
    return ONE in node.metadata or is_of_one(node, size)


def _resolved(terms: list[_Term]) -> list[_Term]:
    """``terms``, of which some are divided by what only others of them, or all, count."""
    known = [float(t.weight) for t in terms if t.count is None and isinstance(t.weight, float)]
    open_ones = [t for t in terms if t.count is not None]
    if not open_ones:
        return terms
    counted = sum(t.count for t in open_ones if t.count is not None)
    found: list[_Term] = []
    for term in terms:
        number = float(term.weight or 0.0)
        if term.count is None:
            found.append(term)
        elif len(open_ones) > 1 and isclose(number, counted, rel_tol=1e-6):  # chunks
            found.append(replace(term, doubt=""))
        else:  # or a multiple: tokens times classes
            base = next((w for w in known if w > 0 and _divides(w, number)), None)
            found.append(term if base is None else replace(term, weight=base, doubt=""))
    return found


def _divides(weight: float, number: float) -> bool:
    return number >= weight and isclose(number / weight, round(number / weight), rel_tol=1e-6)


def _visit(node: Node, divisors: _Divisors, size: int, terms: list[_Term]) -> list[_Path]:
    """Note the term that ``node`` computed, or say where it came from."""
    kind = kind_of(node)
    reduction = _REDUCTIONS.get(kind)
    if reduction is not None:
        return reduction(node, divisors, size, terms)
    if kind in LINEAR or kind in _IDENTITIES:
        return [(parent, divisors) for parent in parents(node)]
    if kind == "MulBackward1":
        return [(parents(node)[0], divisors)]
    if kind == "DivBackward1":
        return [(parents(node)[0], (*divisors, float(node._saved_other)))]
    if kind == "MulBackward0" or kind == "DivBackward0":
        return _scaled(node, kind == "DivBackward0", divisors, size, terms)
    return _unknown(node, size, terms)


def _unknown(node: Node, size: int, terms: list[_Term]) -> list[_Path]:
    """A scalar that is no sum of means, or that nobody sees into."""
    if not of_parameters_alone(node):
        name = kind_of(node).rstrip("0123456789").removesuffix("Backward")
        terms.append(_Term(node, float(size), doubt=OPAQUE.format(name)))
    return []


def _scaled(
    node: Node, divides: bool, divisors: _Divisors, size: int, terms: list[_Term]
) -> list[_Path]:
    """A product, or a quotient, of which one side has all that depends on examples."""
    left, right = (parent for parent, _ in node.next_functions)
    if left is not None and right is not None:
        if of_parameters_alone(right):
            return [(left, divisors)]
        if not divides and of_parameters_alone(left):
            return [(right, divisors)]
    elif divides and left is not None:
        other = node._saved_other
        return [(left, divisors if other.dim() else (*divisors, _read(other)))]
    elif not divides:
        other = factor(node)
        if other is not None and other.is_cpu and not other.dim():
            number = float(other)
            if 0 < number <= 1 or number == inf:
                divisors = (_Reciprocal(1 / number), *divisors)
        return [(right if left is None else left, divisors)]
    return _unknown(node, size, terms)


def _nll(node: Node, divisors: _Divisors, size: int, terms: list[_Term]) -> list[_Path]:
    reduction, target, weight = node._saved_reduction, node._saved_target, node._saved_weight
    if compares_rows(parents(node), size):
        terms.append(_Term(node, float(size), doubt=COMPARES))
    elif reduction == _MEAN:
        found = _read(node._saved_total_weight)
        is_full = weight is None and isinstance(found, float) and found == target.numel()
        terms.append(_Term(node, found, is_full=is_full))
    elif reduction != _SUM:
        return _unknown(node, size, terms)
    else:
        kept = target != signed(node._saved_ignore_index)
        if weight is None:
            counts = kept.count_nonzero()
        else:
            counts = (weight[target.long().masked_fill(~kept, 0)] * kept).sum()
        terms.append(_sum(node, [target.numel(), size], [counts], divisors))
    return []


def _elementwise(node: Node, divisors: _Divisors, size: int, terms: list[_Term]) -> list[_Path]:
    shape = tuple(node._saved_self.shape)
    kind = {_MEAN: "mean", _SUM: "sum"}.get(node._saved_reduction)
    weight = getattr(node, "_saved_weight", None)
    weights = [weight.expand(shape).sum()] if kind == "sum" and weight is not None else []
    return _reduced(node, kind, shape, divisors, size, terms, weights)


def _mean(node: Node, divisors: _Divisors, size: int, terms: list[_Term]) -> list[_Path]:
    return _reduced(node, "mean", tuple(node._saved_self_sym_sizes), divisors, size, terms)


def _total(node: Node, divisors: _Divisors, size: int, terms: list[_Term]) -> list[_Path]:
    return _reduced(node, "sum", tuple(node._saved_self_sym_sizes), divisors, size, terms)


def _nansum(node: Node, divisors: _Divisors, size: int, terms: list[_Term]) -> list[_Path]:
    numbers = node._saved_self
    counts = [(~numbers.isnan()).sum()]
    return _reduced(node, "sum", tuple(numbers.shape), divisors, size, terms, counts)


def _dot(node: Node, divisors: _Divisors, size: int, terms: list[_Term]) -> list[_Path]:
    left, right = (parent for parent, _ in node.next_functions)
    if left is not None and right is not None:
        return _unknown(node, size, terms)
    mask = node._saved_self if left is None else node._saved_tensor
    return _reduced(node, "sum", tuple(mask.shape), divisors, size, terms, [mask.sum()])


def _reduced(
    node: Node,
    kind: str | None,
    shape: tuple[int, ...],
    divisors: _Divisors,
    size: int,
    terms: list[_Term],
    counts: Iterable[Tensor] = (),
) -> list[_Path]:
    """The mean or sum over the elements of a tensor of this shape.

    ``counts`` are sums of factors that ``node`` itself multiplies the elements by.
    """
    above = parents(node)
    if not shape or (above and stacks_scalars(above[0])):
        return [(parent, divisors) for parent in above]
    if kind is None:
        return _unknown(node, size, terms)
    if of_parameters_alone(node):
        return []
    lowest, weighs = _over_rows(node, size)
    if weighs or compares_rows(parents(lowest), size):
        terms.append(_Term(node, float(size), doubt=COMPARES))
        return []
    if lowest is not node:
        kind = "mean" if kind_of(lowest).startswith("Mean") else "sum"
        above = parents(lowest)
        shape = shape_of(above[0])
    below = above[0] if above else None
    if kind == "mean":
        terms.append(_of_mean(lowest, below, shape, divisors, size))
    else:
        found, divisors = list(masks(below)), (*divisors, *_within(below))
        fixed = [prod(shape), *_counts(shape), size]
        term = _sum(lowest, fixed, [*counts, *(total for _, total in found)], divisors)
        if term.weight is None and any(_is_share(*each, shape, 1) for each in found):
            term = replace(term, weight=float(size), doubt=NORMALIZED)
        terms.append(term)
    return []


def _within(node: Node) -> Iterator[float | Tensor]:
    """What all elements are divided by before they are added up: ``(losses * mask / n).sum()``."""
    for each in descent(node):
        kind, mask = kind_of(each), factor(each)
        if kind == "DivBackward1":
            yield float(each._saved_other)
        elif kind == "DivBackward0" and len(parents(each)) == 1:
            other = each._saved_other
            if not other.dim():
                yield _read(other)
        elif mask is None and kind not in LINEAR:
            return


def _over_rows(node: Node, size: int) -> tuple[Node, bool]:
    """The reduction over examples, where those on top of it are over what each of them has.

    Returns:
        It, and whether what it gave is weighed: by numbers that may come from all examples.
    """
    weighs = False
    for each in descent(first_parent(node)):
        kind, mask = kind_of(each), factor(each)
        if kind in _INNER:
            if reduces_rows(each, size):
                return each, weighs
        elif mask is not None:
            weighs = weighs or bool(mask.dim())
        elif kind not in LINEAR or len(parents(each)) != 1:
            break
    return node, False


_INNER = frozenset(("MeanBackward1", "SumBackward1"))


def _of_mean(
    node: Node, below: Node, shape: tuple[int, ...], divisors: _Divisors, size: int
) -> _Term:
    """A mean over all elements, of which a mask may leave some out."""
    number = prod(shape)
    for mask, total in masks(below):
        for found in divisors:  # (losses * mask).mean() / mask.mean()
            if isinstance(found, float) and isclose(found * number, float(total), rel_tol=1e-6):
                return _Term(node, float(total))
        if _is_share(mask, total, shape, number) and bool((mask != 1).any()):
            return _Term(node, float(size), doubt=NORMALIZED)
    return _over(node, below, shape, size)


def _is_share(mask: Tensor, total: Tensor, shape: tuple[int, ...], whole: float) -> bool:
    """Whether each element has a weight of its own, and all of them are made to add up."""
    if not (mask.is_floating_point() and mask.is_cpu and mask.dim() == len(shape)):
        return False
    # As exactly as the division has rounded: for fp32 a sum that is exact is not quite 1.
    tolerance = max(1e-9, float(finfo(mask.dtype).eps) * 16)
    return mask.shape[0] == shape[0] and isclose(float(total), whole, rel_tol=tolerance)


def _counts(shape: tuple[int, ...]) -> list[int]:
    """What a mean over elements of this shape may be divided by: the first dims of them."""
    every = [prod(shape[:stop]) for stop in range(1, len(shape))]
    return [*every, prod(shape) // shape[1]] if len(shape) > 1 and shape[1] else every


def _sum(node: Node, fixed: list[int], counts: list[Tensor], divisors: _Divisors) -> _Term:
    """A sum, which one of ``divisors`` makes a mean.

    Args:
        node: What added up.
        fixed: How many elements, or groups of elements, there are; last, how many examples.
        counts: What the factors of elements add up to.
        divisors: What the sum is divided by.
    """
    totals: list[float] = []
    for found in reversed(divisors):
        if isinstance(found, Tensor):  # made of the data: nobody puts a constant on a device
            return _Term(node, found)
        totals = totals or [float(count) for count in counts]
        number = found.number if isinstance(found, _Reciprocal) else found
        if isinstance(found, _Reciprocal):
            same = [n for n in (*totals, *fixed) if isclose(number, n, rel_tol=1e-6)]
            if any(n > _FEW or not n for n in same):
                return _Term(node, float(same[0]), is_full=not counts)
            if same and same[0] in totals:
                return _Term(node, number, doubt=UNKNOWN_DIVISOR.format(f"{number:g}"))
            continue
        if number in totals:
            return _Term(node, number)
        for total in totals:
            if 0 < number - total <= _SMALL:
                return _Term(node, total, added=number - total)
            if isclose(number, total, rel_tol=1e-6):
                return _Term(node, total)
        if 0 < number <= 1 and 0 in (fixed[0], *totals):  # a count that is 1 at least
            return _Term(node, 0.0)
        if any(isclose(number, count, rel_tol=1e-6) for count in fixed):
            return _Term(
                node, float(round(number)), is_full=not counts, is_rows=number == fixed[-1]
            )
    quotients = [found for found in divisors if isinstance(found, float)]
    if not quotients:
        return _Term(node)
    number = abs(quotients[-1])
    own = totals[-1] if totals else float(fixed[0])
    return _Term(node, number, count=own, doubt=UNKNOWN_DIVISOR.format(f"{number:g}"))


def _over(node: Node, below: Node, shape: tuple[int, ...], size: int) -> _Term:
    """A mean over elements of ``shape``, which ``below`` computed."""
    for each in descent(below):
        kind, above = kind_of(each), parents(each)
        if kind == "MaskedSelectBackward0":
            return _Term(node, float(shape[0]))
        if kind == "IndexBackward0" and each._saved_indices[0] is not None:
            return _Term(node, float(shape_of(each)[0]))
        if kind not in SAME_ELEMENTS and kind not in ROWS:
            break
        if len(above) == 1:
            refuse_pairs(shape_of(each), shape_of(above[0]), size)
    return _Term(node, float(size), is_full=True, is_rows=True, is_mean=True)


def _read(weight: Tensor) -> float | Tensor:
    """A number from the host's memory; elsewhere nobody waits for it."""
    if not weight.is_cpu:
        return weight.detach().view(())
    number: Any = weight.tolist()  # no operation of torch, as float() is one
    return float(number)


def all_equal(weights: Iterable[float | Tensor]) -> bool:
    """Whether numbers are the same but for rounding; the host waits for those of a device."""
    first, *others = map(float, weights)
    return all(isclose(first, other, rel_tol=1e-6) for other in others)


_IDENTITIES = frozenset(("BackwardHookFunctionBackward",))
"""Of modules with hooks on their backward pass."""

_Reduction = Callable[[Node, _Divisors, int, list[_Term]], list[_Path]]
_REDUCTIONS: dict[str, _Reduction] = {
    "DotBackward0": _dot,
    "MeanBackward0": _mean,
    "MeanBackward1": _mean,
    "NansumBackward0": _nansum,
    "NllLoss2DBackward0": _nll,
    "NllLossBackward0": _nll,
    "SumBackward0": _total,
    "SumBackward1": _total,
    **dict.fromkeys(
        (
            "BinaryCrossEntropyBackward0",
            "BinaryCrossEntropyWithLogitsBackward0",
            "HuberLossBackward0",
            "MseLossBackward0",
            "MultiMarginLossBackward0",
            "MultilabelMarginLossBackward0",
            "SmoothL1LossBackward0",
            "SoftMarginLossBackward0",
        ),
        _elementwise,
    ),
}
