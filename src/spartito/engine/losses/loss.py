"""What a batch costs: the model's forward pass, and a loss in any of the forms that users write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import lru_cache
from inspect import signature
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import structs
from torch import Tensor, nn
from torch.nn import functional

from spartito.accelerators import exact
from spartito.data.batch import Batch
from spartito.data.reading.collate import leaves, rows
from spartito.data.reading.placing import known_to_host
from spartito.engine.devices.host_reads import kept_on_host
from spartito.engine.losses.loss_graph import BeginAtLosses
from spartito.engine.losses.loss_means import UNTOLD, divisor
from spartito.engine.updates.optimizers import takes_batches, unwrap
from spartito.errors import UserError

LossFunction = Callable[[Any, Any], Any]
"""``(output, target)`` to a loss; see `weigh` for what it may return."""


class WeightedLoss(msgspec.Struct, frozen=True):
    """``value`` whose gradient is wanted, times ``scale`` the sum over the examples here.

    ``weight`` is what that sum is to be divided by, before those of the other replicas are added.
    It is a number where batch sizes tell it, else a 0-d tensor on the device, which nobody waits
    for. ``doubt`` says why the losses of several replicas make no exact mean, where they do not,
    or (``is_guess``) where nobody knows yet. ``apart`` are numbers, some of them on a device, that
    are to be equal: else the losses make no exact mean either.
    """

    value: Tensor
    scale: float
    weight: float | Tensor
    doubt: str = ""
    is_guess: bool = False
    apart: tuple[float | Tensor, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether anything may come of it: not so of rows that stand in for missing ones."""
        return isinstance(self.weight, Tensor) or self.weight != 0

    @property
    def total(self) -> float | Tensor:
        """The sum over the examples here in fp64 (`wide`): a number where the host has all of it.

        Else it is a 0-d tensor on the device. In the host's memory to look waits for nothing.
        """
        if not self.counts:
            return 0.0
        if not self.value.is_cpu or isinstance(self.weight, Tensor):
            scale = torch.from_numpy(np.array(self.scale)).to(exact(self.value))
            return self.value.detach() * scale  # which is as wide
        number: Any = self.value.tolist()
        return float(number) * self.scale


def forward(model: nn.Module, data: Any, has_loss: bool = True) -> Any:
    """The model's output: of ``x`` in a tuple ``(x, y)``, of all entries but ``"y"`` of a dict.

    Without a loss function the model gets everything, ``model(*data)`` or ``model(**data)``,
    and returns its own loss.
    """
    try:
        if isinstance(data, dict):
            return model(**{k: v for k, v in data.items() if k != "y" or not has_loss})
        if isinstance(data, tuple | list):
            if has_loss:
                return model(data[0])
            is_whole = len(data) == 1 or hasattr(data, "_make")
            return model(data) if is_whole and takes_batches(model) else model(*data)
        return model(data)
    except TypeError as error:
        if (refusal := _not_called_so(model, data, has_loss, error)) is None:
            raise
        raise refusal from error
    except RuntimeError as error:
        whole = next((t for t in leaves(data) if t.dtype in _WHOLE), None)
        if whole is None or not any(word in str(error) for word in _WHOLE[whole.dtype]):
            raise
        raise UserError(
            f"the model does not take an input of {describe(whole)}: {error}",
            "Make it floating: .map(lambda x, y: (x / 255, y)), or sp.data.Rescale(1 / 255).",
        ) from error


def _not_called_so(
    model: nn.Module, data: Any, has_loss: bool, error: TypeError
) -> UserError | None:
    """The error for data that the model's ``forward`` does not take; None where it takes it.

    A function of the user's that gets the batch calls the model in its own way.
    """
    if takes_batches(model):
        return None
    inner = unwrap(model)
    form = signature(inner.forward)
    named: dict[str, Any] = {}
    given: tuple[Any, ...] = (data,)
    if isinstance(data, dict):
        named, given = {k: v for k, v in data.items() if k != "y" or not has_loss}, ()
    elif isinstance(data, tuple | list):
        given = tuple(data[:1]) if has_loss else tuple(data)
    try:
        form.bind(*given, **named)
    except TypeError as why:
        what = f"{type(inner).__name__}.forward{form} does not take the data: {why}"
        if named:
            does = (
                'The keys of a dict are forward\'s arguments, and "y" is the target: rename them '
                "by .map, or give (x, y)."
            )
        elif has_loss:
            does = "It gets the first part of (x, y)."
        else:
            does = (
                "Without loss= the model gets all parts, and computes the loss: give the Trainer "
                "a loss=."
            )
        return UserError(what, does)
    if any(isinstance(part, str) for part in _strings(data)):
        return UserError(
            f"{type(inner).__name__} does not take texts: {error}",
            "Tokenize them first: .map(tokenizer).",
        )
    return None


def _strings(data: Any) -> Iterator[Any]:
    if isinstance(data, Mapping):
        data = tuple(data.values())
    if isinstance(data, tuple | list):
        for part in data:
            yield from _strings(part)
    else:
        yield data


_WHOLE = {torch.uint8: ("Byte", "unsigned char"), torch.int64: ("Long", "long int")}
"""Numbers of images that nobody rescaled, and how torch calls them in its errors."""


def in_dtype(batch: Batch, dtype: torch.dtype | None) -> Batch:
    """``batch`` with its floating tensors in ``dtype``: numpy's float64 meets a float32 model."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    if dtype is None or _is_in(batch.data, dtype):
        return batch
    return structs.replace(batch, data=rows(batch.data, cast))


def _is_in(data: Any, dtype: torch.dtype) -> bool:
    """Whether the floating tensors of ``data`` are in ``dtype``; without `leaves`, it is hot."""
    if isinstance(data, Tensor):
        return data.dtype == dtype or not data.is_floating_point()
    if isinstance(data, (tuple, list)):
        for part in data:  # noqa: SIM110 - all() would make a generator
            if not _is_in(part, dtype):
                return False
        return True
    return not isinstance(data, Mapping) or _is_in(tuple(data.values()), dtype)


def evaluate_loss(loss: LossFunction | None, output: Any, batch: Batch) -> Any:
    """What ``loss`` says of ``output``; without one, what the model said itself.

    torch's own losses get a target of the output's shape and dtype where only dims of size 1
    and the dtype differ (labels ``(n,)`` for logits ``(n, 1)``), and an error that names both.
    """
    if loss is None:
        return own_loss(output)
    data = batch.data
    if isinstance(data, (tuple, list)) and len(data) > 2:
        return _of_weighted(loss, output, batch)
    target = batch.target
    if not of_torch(loss):
        return loss(output, target)
    output = widened(output)
    classifies = isinstance(loss, _CLASSES)
    if classifies:
        _refuse_one_class(loss, output)
    target = align(output, target)
    try:
        if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
            raise TypeError("both are tensors")
        exact = _over_classes if classifies else _over_elements
        found = exact(loss, output, target)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise UserError(
            f"{type(loss).__name__} does not fit an output of {describe(output)} "
            f"and a target of {describe(target)}: {error}",
            "Shapes and dtypes of the model's output and the target must suit the loss.",
        ) from error
    if isinstance(found, Tensor) and not found.dim():  # torch's means: no graph has to tell
        return WeightedLoss(found, float(batch.size), float(batch.size))
    return found


def _of_weighted(loss: LossFunction, output: Any, batch: Batch) -> Any:
    """The loss of examples with a weight each, the third part of the data.

    A weight of 2 counts as if the example's loss were twice as large: what the sum is divided by
    stays as it is without weights, as in Keras.
    """
    weights = _example_weights(batch)
    plain = structs.replace(batch, data=tuple(batch.data[:2]))
    is_mean = of_torch(loss) and getattr(loss, "reduction", "") == "mean"
    each = evaluate_loss(_unreduced(loss) if is_mean else loss, output, plain)
    if not isinstance(each, Tensor) or not each.dim() or len(each) != batch.size:
        raise UserError(
            f"a loss of {describe(each)} for {batch.size} examples with a weight each",
            "Return one loss per example, or leave the weights out: .map(lambda x, y, w: (x, y)).",
        )
    each = each.flatten(1) if each.dim() > 1 else each[:, None]
    if is_mean and isinstance(loss, _CLASSES) and not batch.target.is_floating_point():
        return (each.sum(1) * weights).sum(), _class_weight(loss, batch.target)
    return each.mean(1) * weights


def _example_weights(batch: Batch) -> Tensor:
    weights, size = batch.data[2], batch.size
    good = isinstance(weights, Tensor) and weights.is_floating_point() and weights.numel() == size
    if len(batch.data) > 3 or not good:
        raise UserError(
            f"examples of {len(batch.data)} parts: {describe(batch.data)}",
            "With a loss an example is (x, y), or (x, y, weight) with a floating number. Leave "
            "out what is not used: .map(lambda x, y, *rest: (x, y)).",
        )
    found: Tensor = weights.reshape(size)
    return found


def _unreduced(loss: Any) -> Any:
    """One of torch's losses that gives each element its own."""
    made = copy(loss)
    made.reduction = "none"
    return made


def look(loss: LossFunction, output: Any, batch: Batch) -> WeightedLoss:
    """What ``loss`` says of ``output``, where no gradient of it is wanted.

    What it was divided by is told by a graph, so it gets one that ends at the output.
    """
    if of_torch(loss):
        return weigh(evaluate_loss(loss, output, batch), batch)
    with torch.enable_grad(), BeginAtLosses(batch.size):
        return weigh(evaluate_loss(loss, mapped(output, _attached), batch), batch)


def _attached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def mapped(data: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """As `rows`, and what knows its parts by name still does."""
    if isinstance(data, Mapping) and type(data) is not dict:
        parts = {name: mapped(part, function) for name, part in data.items()}
        kind: Any = type(data)
        try:
            return kind(**parts)
        except TypeError:
            return parts
    if isinstance(data, tuple) and hasattr(data, "_make"):
        made: Any = data
        return made._make(mapped(part, function) for part in data)
    return rows(data, function)


def look_at_own(
    model: nn.Module, batch: Batch, from_first: bool = False
) -> tuple[Any, WeightedLoss]:
    """The output of a model that computes its loss, and that; no gradient of it is wanted.

    Args:
        model: Any.
        batch: What it gets.
        from_first: Whether to keep the graph of all layers; else it begins at the loss.
    """
    with torch.enable_grad() if from_first else BeginAtLosses(batch.size):
        output = forward(model, batch.data, has_loss=False)
        found = weigh_own(output, batch)
    return (mapped(output, Tensor.detach) if from_first else output), found


def weigh_own(output: Any, batch: Batch) -> WeightedLoss:
    """The loss of a model that computes it; a scalar without a graph is a guess.

    Args:
        output: What the model returned.
        batch: Of which it is.
    """
    loss = own_loss(output)
    found = weigh(loss, batch)
    if not isinstance(loss, Tensor) or loss.dim() or loss.requires_grad:
        return found
    return structs.replace(found, doubt=UNTOLD, is_guess=True)


def widened(output: Any) -> Any:
    """``output`` in float32 where it has fewer digits: as torch's losses take it."""
    if isinstance(output, Tensor) and output.dtype in (torch.bfloat16, torch.float16):
        return output.float()
    return output


def of_torch(loss: LossFunction) -> bool:
    """Whether ``loss`` is one of ``torch.nn``'s modules."""
    kind: Any = type(loss)
    return _is_torchs(kind)


@lru_cache
def _is_torchs(kind: type[Any]) -> bool:
    return issubclass(kind, nn.Module) and kind.__module__.startswith("torch.nn.")


def align(output: Any, target: Any) -> Any:
    """``target`` in the shape and dtype of ``output``, where it holds one value for each."""
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
        return target
    if output.numel() != target.numel() or not output.is_floating_point():
        return target
    if output.shape == target.shape:
        return target if target.is_floating_point() else target.to(output.dtype)
    if [n for n in output.shape if n != 1] == [n for n in target.shape if n != 1]:
        return target.reshape(output.shape).to(output.dtype)
    return target


def make_loss(given: LossFunction | None) -> LossFunction | None:
    """``given``, if a strategy can weigh its value; torch's functions become its modules."""
    if isinstance(given, type):
        raise UserError(
            f"loss={given.__name__} is a class",
            f"Make one of it: {given.__name__}().",
        )
    if given is not None and not callable(given):
        raise UserError(
            f"loss={given!r} is not a function",
            "Give a torch loss, as torch.nn.CrossEntropyLoss(), or a function (output, target).",
        )
    if given is not None:
        _check_takes_two(given)
    if given is not None and getattr(given, "reduction", "mean") == "sum":
        raise UserError(
            f"{type(given).__name__}(reduction='sum')",
            "Use 'mean' or 'none': Spartito divides by the global weight itself.",
        )
    for function, module in _MODULES.items():
        if given is function:
            return module()
    return given


def _check_takes_two(loss: Any) -> None:
    """Refuse a loss that is not one of output and target."""
    called = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        form = signature(called)
    except (TypeError, ValueError):  # of a function in C nobody knows
        return
    try:
        form.bind(None, None)
    except TypeError as why:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise UserError(
            f"loss={name}{form} is called with the output and the target: {why}",
            "Write loss=lambda output, target: ...",
        ) from None


_MODULES: dict[LossFunction, type[nn.Module]] = {
    functional.binary_cross_entropy: nn.BCELoss,
    functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.huber_loss: nn.HuberLoss,
    functional.l1_loss: nn.L1Loss,
    functional.mse_loss: nn.MSELoss,
    functional.nll_loss: nn.NLLLoss,
    functional.smooth_l1_loss: nn.SmoothL1Loss,
}


def _refuse_one_class(loss: LossFunction, output: Any) -> None:
    """One class is always the right one: such a loss is 0, and stays so."""
    if isinstance(output, Tensor) and (output.dim() < 2 or output.shape[1] == 1):
        raise UserError(
            f"{type(loss).__name__} of an output of {describe(output)}: it has one class",
            "Give the model one output per class, or take BCEWithLogitsLoss for yes or no.",
        )


def _over_elements(loss: LossFunction, output: Tensor, target: Tensor) -> Any:
    if isinstance(loss, _ELEMENTWISE) and output.shape != target.shape:
        raise ValueError("the shapes differ")
    return loss(output, target)


def _over_classes(loss: Any, output: Tensor, target: Tensor) -> Any:
    """The loss, as ``(sum, weight)`` where torch's mean is not one over examples."""
    if loss.reduction != "mean" or target.is_floating_point():
        return loss(output, target)
    # torch divides by the weights of the classes that count, not by the examples.
    weight = _class_weight(loss, target)
    if target.dim() == 1 and isinstance(weight, int) and weight == target.numel():
        return loss(output, target)
    options: Any = {"weight": loss.weight, "ignore_index": loss.ignore_index, "reduction": "sum"}
    if isinstance(loss, nn.NLLLoss):
        return functional.nll_loss(output, target, **options), weight
    smoothing = loss.label_smoothing
    return functional.cross_entropy(output, target, **options, label_smoothing=smoothing), weight


def count_kept(target: Tensor, ignored: int) -> int:
    """How many of the targets, which lie in the host's memory, are not ``ignored``."""
    size = target.numel()
    if size > _FEW:
        return int(np.count_nonzero(target.numpy() != ignored))
    rows = target if target.dim() == 1 else target.reshape(-1)
    found: list[Any] = rows.tolist()
    return size - found.count(ignored)


_FEW = 256
"""Values that are looked at sooner in a list than numpy has begun: 2 instead of 8 us in a step."""


def _class_weight(loss: nn.CrossEntropyLoss | nn.NLLLoss, target: Tensor) -> int | float | Tensor:
    """The sum of the weights of the targets that are not to be ignored.

    Targets came from the host's memory: to look at them there waits for nothing.
    """
    ignored, weights, known = loss.ignore_index, loss.weight, known_to_host(target)
    if weights is None:
        if known is not None:
            return count_kept(known, ignored)
        return torch.ne(target.long(), ignored).count_nonzero()
    if known is None:
        return _sum_of_weights(weights, target, ignored)
    total: float = _sum_of_weights(kept_on_host(weights), known, ignored).item()
    return total


def _sum_of_weights(weights: Tensor, target: Tensor, ignored: int) -> Tensor:
    labels = target.long()  # of bytes, -100 would be 156, and an index a mask
    counted = torch.ne(labels, ignored)
    return (weights[labels.masked_fill(~counted, 0)] * counted).sum()


_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_ELEMENTWISE = (
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.HuberLoss,
    nn.L1Loss,
    nn.MSELoss,
    nn.SmoothL1Loss,
)


def own_loss(output: Any) -> Any:
    """The loss of a model that computes it: its output, or ``["loss"]`` or ``.loss`` of that.

    With ``num_items`` beside it, it is the mean over so many items (tokens), not examples.
    """
    if isinstance(output, Tensor | tuple) and not hasattr(output, "loss"):
        return output
    found, items = _entry(output, "loss"), _entry(output, "num_items")
    if found is None:
        raise UserError(
            f"no loss function, and the model returned {describe(output)}",
            'Give the Trainer a loss, or let the model return {"loss": ..., "output": ...}.',
        )
    if items is None:
        return found
    if not isinstance(found, Tensor) or found.dim():
        raise UserError(f"a loss of {describe(found)} beside num_items", "It is their scalar mean.")
    if isinstance(items, Tensor) and items.device.type != "cpu":
        return torch.where(items.view(()) > 0, found * items.view(()), 0.0), items
    return (found * items if items else _nothing(output, found), items)


def _nothing(output: Any, found: Tensor) -> Tensor:
    """0, with a gradient of 0 for the model: a mean over no items is NaN."""
    parts = output.values() if isinstance(output, Mapping) else vars(output).values()
    attached = [p for p in parts if isinstance(p, Tensor) and p is not found and p.requires_grad]
    return (attached[0] if attached else found.nan_to_num()).sum() * 0.0


def _entry(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


IGNORED = -100
"""The label that torch and others leave out."""


def weigh(given: Any, batch: Batch) -> WeightedLoss:
    """A loss as its user wrote it: a mean, one per example, or ``(sum, weight)``.

    A scalar is a mean over examples, or over what its graph says that it was divided by. What is
    weighed already stays as it is.
    """
    if isinstance(given, WeightedLoss):
        return given
    if isinstance(given, tuple) and len(given) == 2:
        number = isinstance(given[1], int | float) or (
            isinstance(given[1], Tensor) and given[1].numel() == 1
        )
        if not isinstance(given[0], Tensor) or given[0].dim() or not number:
            raise UserError(
                f"a loss of {describe(given)}",
                "As (sum, weight) it is the scalar sum over the examples, and its divisor. "
                'A model that computes its loss returns {"loss": ..., "output": ...}.',
            )
        divisor = given[1]
        if isinstance(divisor, Tensor) and divisor.requires_grad:
            raise UserError(
                "a loss of (sum, weight) whose weight has a gradient: it is a second loss, and "
                "no number of items",
                "Add up two losses, or give the weight's .detach().",
            )
        weight = divisor.detach().view(()) if isinstance(divisor, Tensor) else float(divisor)
        return WeightedLoss(given[0], 1.0, weight)
    if not isinstance(given, Tensor):
        raise UserError(
            f"a loss of {describe(given)}",
            "It is a scalar mean over the examples, one value per example, or (sum, weight).",
        )
    if given.dim() == 0:
        return _weigh_scalar(given, batch)
    if given.shape[0] != batch.size:
        raise UserError(
            f"a loss of shape {tuple(given.shape)} for {batch.size} examples",
            "It is a scalar mean over the examples, one value per example, or (sum, weight).",
        )
    per_example = given if given.dim() == 1 else given.flatten(1).mean(1)
    return WeightedLoss(per_example.sum(), 1.0, float(batch.size))


def _weigh_scalar(given: Tensor, batch: Batch) -> WeightedLoss:
    size = float(batch.size)
    found = divisor(given, batch.size)
    if found is None:
        return WeightedLoss(given, size, size)
    if found.is_sum:  # the parts of a global batch weigh 1 together
        return WeightedLoss(given, 1.0, size / (batch.global_size or size or 1.0))
    weight = found.weight
    if isinstance(weight, Tensor):
        total = torch.where(weight > 0, given * weight, 0.0)  # a mean over nothing is NaN
        return WeightedLoss(total, 1.0, weight, found.doubt, found.is_guess, found.apart)
    scale = weight + found.added
    if found.added:  # once in all parts of a global batch
        weight += found.added * size / (batch.global_size or size)
    return WeightedLoss(given, scale, weight, found.doubt, found.is_guess, found.apart)


def describe(value: Any) -> str:
    """A value in an error message: shape and dtype of a tensor, else its type."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple | list):
        return f"({', '.join(describe(part) for part in value)})"
    return type(value).__name__
