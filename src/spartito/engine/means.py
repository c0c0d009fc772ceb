"""What a scalar loss is a mean over, read from the graph that autograd keeps for its gradient.

A mean of replicas' means is that of all examples only where each counts for what it was divided
by: kept tokens, class weights, a mask. Torch notes these numbers in the graph anyway, so they are
known in every training loop, whoever called the loss function, for some microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isclose, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from spartito.errors import UserError

Node = Any
"""A node of torch's graph: its class and ``_saved_...`` attributes are torch's, and not typed."""


@dataclass(frozen=True, slots=True)
class Divisor:
    """What a scalar loss was divided by.

    Attributes:
        weight: The number; a 0-d tensor on the device where the host does not know it.
        doubt: Why means of several replicas make no exact mean; empty where they do.
        is_sum: It is a sum that nothing divided.
    """

    weight: float | Tensor
    doubt: str = ""
    is_sum: bool = False


@dataclass(frozen=True, slots=True)
class _Term:
    """A reduction that is added to the loss.

    ``weight`` None: an unknown one, or (``is_sum``) a sum that nothing divides. ``is_full``: it
    counts all elements, equally many of each example. ``is_rows``: as many as there are examples.
    ``is_known``: it was seen to be what was counted, and no constant.
    """

    node: Node
    weight: float | Tensor | None = None
    is_full: bool = False
    is_rows: bool = False
    is_known: bool = True
    is_sum: bool = False


NOT_A_MEAN = "a loss that adds a sum over the batch to something else"
"""Doubts are nouns: they begin the error or the warning."""
UNKNOWN_DIVISOR = "a loss that is a sum over the batch divided by {}, which counts nothing in it"
SEVERAL = "a loss that adds up means over different numbers of items"
BESIDE = "a loss that adds something else to a mean over the items that count"

UNREADABLE = "a loss whose graph cannot be read"

ADVICE = (
    "Return (sum, count): the sum over this batch, and the number of items (or of their weights) "
    "that it is divided by; or one loss per example."
)

_MARK = "spartito.weight"
_ONE = "spartito.one"
_MARKED = frozenset(("DivBackward0",))
_MOST_NODES = 4096
_MEAN, _SUM = 1, 2
"""Torch's numbers of its reductions."""

_Divisors = tuple[Tensor, ...]
_Path = tuple[Node, _Divisors]


def _kinds(names: str) -> frozenset[str]:
    """Kinds of nodes, by the names that torch gives them."""
    return frozenset(f"{name}Backward{number}" for name in names.split() for number in range(3))


class _Reciprocal(Tensor):
    """1 over a factor: ``sum * (1 / n)``, where that is what was counted."""


def mark(mean: Tensor, weight: Tensor) -> Tensor:
    """Note what ``mean`` was divided by, for a mean that is made of other operations.

    Args:
        mean: A scalar with a graph, or without.
        weight: The divisor, a scalar.

    Returns:
        ``mean``.
    """
    if mean.grad_fn is not None:
        notes: Any = mean.grad_fn.metadata
        notes[_MARK] = weight.detach()
    return mean


def divisor(loss: Tensor, size: int) -> Divisor | None:
    """What a scalar loss over ``size`` examples was divided by.

    Args:
        loss: A scalar.
        size: How many examples it is about.

    Returns:
        None for a mean over examples, as far as the graph tells.

    Raises:
        UserError: An output ``(n, 1)`` met a target ``(n,)``, which makes ``(n, n)`` of them.
    """
    if loss.grad_fn is None:
        return None
    terms: list[_Term] = []
    waiting: list[_Path] = [(loss.grad_fn, ())]
    try:
        for _ in range(_MOST_NODES):
            if not waiting:
                return _joined(terms, size)
            node, divisors = waiting.pop()
            waiting += _visit(node, divisors, size, terms)
    except (RuntimeError, AttributeError) as error:  # what was saved is gone, or elsewhere
        return Divisor(float(size), f"{UNREADABLE} ({error})")
    return None


def _joined(terms: list[_Term], size: int) -> Divisor | None:
    counted = [term for term in terms if term.weight is not None]
    if len(counted) == size and all(_is_of_one(term.node, size) for term in counted):
        return None  # a loop over the examples
    others = [term for term in terms if term.weight is None]
    others = [term for term in others if term.is_sum or not _of_parameters_alone(term.node)]
    has_sum = any(term.is_sum for term in others)
    if has_sum and not counted and all(term.is_sum for term in others):
        return Divisor(0.0, is_sum=True)
    if has_sum:
        return Divisor(float(size), NOT_A_MEAN)
    chosen = next((term for term in counted if not term.is_rows), None)
    if chosen is None or chosen.weight is None:
        return None
    weight = chosen.weight
    seen = [term.weight for term in counted if term.is_known and term.weight is not None]
    if not chosen.is_known and not (seen and _all_equal([weight, *seen])):
        return Divisor(weight, UNKNOWN_DIVISOR.format(f"{float(weight):g}"))
    if all(term.is_full for term in counted):
        return Divisor(weight)
    if others:
        return Divisor(weight, BESIDE)
    same = _all_equal([term.weight for term in counted if term.weight is not None])
    return Divisor(weight, "" if same else SEVERAL)


def _visit(node: Node, divisors: _Divisors, size: int, terms: list[_Term]) -> list[_Path]:
    """Note the term that ``node`` computed, or say where it came from.

    ``divisors`` are what the result is divided by afterwards: factors first, the nearest last.
    """
    kind = type(node).__name__
    reduction = _REDUCTIONS.get(kind)
    if kind in _MARKED and _MARK in node.metadata:
        terms.append(_Term(node, _read(node.metadata[_MARK])))
        return []
    if reduction is not None:
        return reduction(node, divisors, size, terms)
    if kind in _LINEAR:
        return [(parent, divisors) for parent in _parents(node)]
    if kind == "MulBackward1":
        return [(_parents(node)[0], divisors)]
    if kind == "DivBackward1":
        return [(_parents(node)[0], (*divisors, torch.tensor(float(node._saved_other))))]
    if kind == "MulBackward0" or kind == "DivBackward0":
        return _scaled(node, kind == "DivBackward0", divisors, terms)
    terms.append(_Term(node))
    return []


def _scaled(node: Node, divides: bool, divisors: _Divisors, terms: list[_Term]) -> list[_Path]:
    """A product, or a quotient, of which one side has all that depends on examples."""
    left, right = (parent for parent, _ in node.next_functions)
    if left is not None and right is not None:
        if _of_parameters_alone(right):
            return [(left, divisors)]
        if not divides and _of_parameters_alone(left):
            return [(right, divisors)]
    elif divides and left is not None:
        other = node._saved_other
        return [(left, divisors if other.dim() else (*divisors, other))]
    elif not divides:
        other = node._saved_self if left is None else node._saved_other
        if other.is_cpu and not other.dim() and 0 < float(other) < 1:
            divisors = ((1 / other).as_subclass(_Reciprocal), *divisors)
        return [(right if left is None else left, divisors)]
    terms.append(_Term(node))
    return []


def _nll(node: Node, divisors: _Divisors, size: int, terms: list[_Term]) -> list[_Path]:
    reduction, target, weight = node._saved_reduction, node._saved_target, node._saved_weight
    if reduction == _MEAN:
        found = _read(node._saved_total_weight)
        is_full = weight is None and isinstance(found, float) and found == target.numel()
        terms.append(_Term(node, found, is_full))
    elif reduction != _SUM:
        terms.append(_Term(node))
    else:
        kept = target != _signed(node._saved_ignore_index)
        if weight is None:
            counts = kept.count_nonzero()
        else:
            counts = (weight[target.long().masked_fill(~kept, 0)] * kept).sum()
        terms.append(_sum(node, [target.numel(), size], [counts], divisors))
    return []


def _elementwise(node: Node, divisors: _Divisors, size: int, terms: list[_Term]) -> list[_Path]:
    shape = tuple(node._saved_self.shape)
    kind = {_MEAN: "mean", _SUM: "sum"}.get(node._saved_reduction)
    return _reduced(node, kind, shape, divisors, size, terms)


def _mean(node: Node, divisors: _Divisors, size: int, terms: list[_Term]) -> list[_Path]:
    return _reduced(node, "mean", tuple(node._saved_self_sym_sizes), divisors, size, terms)


def _total(node: Node, divisors: _Divisors, size: int, terms: list[_Term]) -> list[_Path]:
    return _reduced(node, "sum", tuple(node._saved_self_sym_sizes), divisors, size, terms)


def _reduced(
    node: Node,
    kind: str | None,
    shape: tuple[int, ...],
    divisors: _Divisors,
    size: int,
    terms: list[_Term],
) -> list[_Path]:
    """The mean or sum over the elements of a tensor of this shape."""
    parents = _parents(node)
    if not shape or (parents and _stacks_scalars(parents[0])):
        return [(parent, divisors) for parent in parents]
    if kind is None:
        terms.append(_Term(node))
    elif not _of_parameters_alone(node):
        below = parents[0] if parents else None
        mean = _over(node, below, shape, size)
        if kind == "sum":
            fixed = [prod(shape), *_counts(shape), size]
            mean = _sum(node, fixed, _masks(below), divisors)
        terms.append(mean)
    return []


def _counts(shape: tuple[int, ...]) -> list[int]:
    """What a mean over elements of this shape may be divided by: the first dims of them."""
    every = [prod(shape[:stop]) for stop in range(1, len(shape))]
    return [*every, prod(shape) // shape[1]] if len(shape) > 1 and shape[1] else every


def _sum(node: Node, fixed: list[int], masks: list[Tensor], divisors: _Divisors) -> _Term:
    """A sum, which one of ``divisors`` makes a mean.

    Args:
        node: What added up.
        fixed: How many elements, or groups of elements, there are.
        masks: What the factors of elements add up to.
        divisors: What the sum is divided by.
    """
    for found in reversed(divisors):
        if isinstance(found, _Reciprocal):
            number = float(found)
            if number > _FEW and any(isclose(number, n) for n in (*fixed, *map(float, masks))):
                return _Term(node, number, is_known=False)
            continue
        if not found.is_cpu:  # made of the data: nobody puts a constant there
            return _Term(node, found.detach().view(()))
        number = float(found)
        for mask in masks:
            total = float(mask)
            if isclose(number, total, rel_tol=1e-6) or (total == 0 and 0 < number <= 1):
                return _Term(node, total)
        if any(isclose(number, count, rel_tol=1e-6) for count in fixed):
            return _Term(node, float(round(number)), is_full=not masks, is_rows=number == fixed[-1])
    quotients = [found for found in divisors if not isinstance(found, _Reciprocal)]
    if not quotients:
        return _Term(node, is_sum=True)
    return _Term(node, abs(float(quotients[-1])), is_known=False)


def _masks(node: Node) -> list[Tensor]:
    """What the factors of the elements that are added up come to: masks, weights."""
    found: list[Tensor] = []
    whole: Tensor | None = None
    for _ in range(_STEPS):
        if node is None:
            break
        kind = type(node).__name__
        if kind == "MulBackward0":
            left, right = (parent for parent, _ in node.next_functions)
            if left is None or right is None:
                mask = node._saved_self if left is None else node._saved_other
                if mask.dim():
                    whole = mask if whole is None else whole * mask
                    found.append(mask.sum(dtype=torch.float64))
                    found.append(whole.expand(_shape(node)).sum(dtype=torch.float64))
        elif kind == "MaskedFillBackward0":
            mask = node._saved_mask
            found.append((~mask).sum())
        elif kind == "WhereBackward0":
            condition = node._saved_condition
            found += [condition.sum(), (~condition).sum()]
        elif kind not in _SAME_ELEMENTS:
            break
        node = next(iter(_parents(node)), None)
    return found


_STEPS = 12
"""So many operations below a reduction are looked at."""


_FEW = 2
"""0.5 is rather a factor than 1 over the number of examples."""


def _is_of_one(node: Node, size: int) -> bool:
    """Whether a loss is that of one example, which was picked from the batch."""
    if _ONE in node.metadata:
        return True
    for _ in range(_STEPS):
        node = next(iter(_parents(node)), None)
        kind = type(node).__name__
        if kind in _PICKS:
            whole = _shape(_parents(node)[0])
            dim = (
                0
                if kind == "UnbindBackward0" and not hasattr(node, "_saved_dim")
                else node._saved_dim
            )
            return dim == 0 and whole[:1] == (size,)
        if kind not in _SAME_ELEMENTS and kind not in _ROWS:
            break
    return False


_PICKS = frozenset(("SelectBackward0", "UnbindBackward0", "SliceBackward0"))


def _over(node: Node, below: Node, shape: tuple[int, ...], size: int) -> _Term:
    """A mean over elements of ``shape``, which ``below`` computed."""
    each = below
    for _ in range(_STEPS):
        if each is None:
            break
        kind = type(each).__name__
        if kind == "MaskedSelectBackward0":
            return _Term(node, float(shape[0]))
        if kind == "IndexBackward0" and each._saved_indices[0] is not None:
            return _Term(node, float(_shape(each)[0]))
        if kind not in _SAME_ELEMENTS and kind not in _ROWS:
            break
        parents = _parents(each)
        if len(parents) == 1:
            _refuse_pairs(_shape(each), _shape(parents[0]), size)
        each = parents[0] if parents else None
    return _Term(node, float(size), is_full=True, is_rows=True)


def _refuse_pairs(shape: tuple[int, ...], before: tuple[int, ...], size: int) -> None:
    """Refuse an output ``(n, 1)`` that a target ``(n,)`` made ``(n, n)``, or the other way."""
    if size > 1 and shape == (size, size) and before in ((size, 1), (size,)):
        other = (size,) if before == (size, 1) else (size, 1)
        raise UserError(
            f"a loss that compares each output with every target: {before} against {other} "
            f"makes {shape}",
            "Give both one shape: target.view_as(output), or output.squeeze(1).",
        )


def _stacks_scalars(node: Node) -> bool:
    """Whether a vector was put together of scalars: losses, not elements."""
    for _ in range(_STEPS):
        kind = type(node).__name__
        if kind == "StackBackward0":
            return all(not _shape(parent) for parent in _parents(node))
        parents = _parents(node)
        if kind not in ("MulBackward0", "NegBackward0", "ToCopyBackward0") or len(parents) != 1:
            return False
        node = parents[0]
    return False


def _of_parameters_alone(node: Node) -> bool:
    """Whether nothing but parameters went into what ``node`` computed, as into a penalty."""
    seen, waiting = {id(node)}, [node]
    while waiting:
        each = waiting.pop()
        kind = type(each).__name__
        if kind == "AccumulateGrad":
            if not isinstance(each.variable, nn.Parameter):
                return False  # an output whose graph begins here
            continue
        if kind not in _OF_PARAMETERS or len(seen) > _MOST_NODES:
            return False
        parents = _parents(each)
        if kind in _OF_TWO and len(parents) == 1 and not _is_scaled(each, kind, parents[0]):
            return False
        for parent in parents:
            if id(parent) not in seen:
                seen.add(id(parent))
                waiting.append(parent)
    return True


def _is_scaled(node: Node, kind: str, parent: Node) -> bool:
    """Whether the other operand was a number, or (an anchor) a tensor like the parameter."""
    if kind in ("MulBackward0", "DivBackward0"):
        other = node._saved_other if node._saved_other is not None else node._saved_self
        return other is not None and not other.dim()
    return kind in ("AddBackward0", "SubBackward0") and _shape(node) == _shape(parent)


_OF_TWO = _kinds("Add Div Mm Mul Sub")


def _parents(node: Node) -> list[Node]:
    return [parent for parent, _ in node.next_functions if parent is not None]


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(node._input_metadata[0].shape)


def _read(weight: Tensor) -> float | Tensor:
    """A number from the host's memory; elsewhere nobody waits for it."""
    return float(weight) if weight.is_cpu else weight.detach().view(())


def _signed(number: int) -> int:
    """An index that torch shows without its sign."""
    return number - (1 << 64) if number >= 1 << 63 else number


_looks = 8
"""So often numbers on a device are read to compare them; then nobody waits for them again."""


def _all_equal(weights: list[float | Tensor]) -> bool:
    global _looks
    if len(weights) == 1:
        return True
    if any(isinstance(weight, Tensor) for weight in weights):
        if not _looks:
            return True
        _looks -= 1
    first, *others = map(float, weights)
    return all(isclose(first, other, rel_tol=1e-6) for other in others)


_LINEAR = _kinds(
    "Add Alias Cat Clone Expand NanToNum Neg ReshapeAlias Rsub Squeeze Stack Sub ToCopy "
    "UnsafeView Unsqueeze View Where"
)
"""Of scalars."""

_SAME_ELEMENTS = _kinds(
    "Abs Add BinaryCrossEntropy BinaryCrossEntropyWithLogits Clamp ClampMax ClampMin Clone "
    "Div Exp Expand HuberLoss Log Log1P LogCosh LogSigmoid MaskedFill Maximum Minimum MseLoss "
    "Mul Neg NllLoss NllLoss2D Pow Relu ReshapeAlias Rsub Sigmoid SmoothL1Loss Softplus Sqrt "
    "Square Sub Tanh ToCopy UnsafeView View Where Xlogy"
)
"""Of elements, each for itself."""

_ROWS = _kinds("Gather LinalgVectorNorm LogSoftmax Mean Norm Softmax Squeeze Sum Unsqueeze")
"""Of rows, each for itself."""

_OF_PARAMETERS = _kinds(
    "Abs Add Cat Clamp ClampMin Clone Div Exp LinalgVectorNorm Log Mean Mm Mul Neg Norm "
    "Permute Pow Relu ReshapeAlias Rsub Select Sigmoid Softplus Sqrt Square Squeeze Stack Sub "
    "Sum T ToCopy Transpose Unsqueeze View"
)

_Reduction = Callable[[Node, _Divisors, int, list[_Term]], list[_Path]]
_REDUCTIONS: dict[str, _Reduction] = {
    "NllLossBackward0": _nll,
    "NllLoss2DBackward0": _nll,
    "MeanBackward0": _mean,
    "SumBackward0": _total,
    **dict.fromkeys(
        (
            "MseLossBackward0",
            "HuberLossBackward0",
            "SmoothL1LossBackward0",
            "BinaryCrossEntropyBackward0",
            "BinaryCrossEntropyWithLogitsBackward0",
            "SoftMarginLossBackward0",
            "MultiMarginLossBackward0",
            "MultilabelMarginLossBackward0",
        ),
        _elementwise,
    ),
}


class BeginAtLosses(TorchFunctionMode):
    """A block without gradients, in which a graph begins at the first loss of torch's.

    So a model that computes its own loss tells what that was divided by in an evaluation too, and
    keeps nothing of its layers.

    Args:
        size: How many examples the model gets.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._had_gradients = torch.is_grad_enabled()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func not in _LOSSES or not args:
            return func(*args, **named)
        if not self._had_gradients and not torch.is_grad_enabled():
            torch.set_grad_enabled(True)  # also for what the loss is divided by later
        first, *others = args
        if not isinstance(first, Tensor) or first.requires_grad or not first.is_floating_point():
            return func(*args, **named)
        found = func(first.detach().requires_grad_(), *others, **named)
        if isinstance(found, Tensor) and found.grad_fn is not None and self._is_one(first):
            notes: Any = found.grad_fn.metadata
            notes[_ONE] = True
        return found

    def _is_one(self, scores: Tensor) -> bool:
        """Whether they are those of one example, picked from all."""
        base = scores._base
        if base is None or not base.dim() or base.shape[0] % max(self._size, 1):
            return False
        return scores.numel() * self._size == base.numel()

    def __exit__(self, *error: Any) -> None:
        torch.set_grad_enabled(self._had_gradients)
        super().__exit__(*error)  # type: ignore[no-untyped-call]


_LOSSES = frozenset((functional.cross_entropy, functional.nll_loss))
"""Those whose mean may be one over something else than examples."""
