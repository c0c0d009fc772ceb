"""How a task computes a batch: forward and backward passes of a model that lies whole before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from msgspec import structs
from torch import nn

from spartito.data.batch import Batch
from spartito.data.reading.collate import count_rows, rows
from spartito.engine.devices.host_reads import Number
from spartito.engine.devices.precision import autocast
from spartito.engine.gradients.backward import backward, first_gradient
from spartito.engine.logged import listening
from spartito.engine.losses.loss import (
    LossFunction,
    WeightedLoss,
    evaluate_loss,
    forward,
    in_dtype,
    look,
    look_at_own,
    weigh,
)
from spartito.engine.modules.batchnorm import check_evaluation, keeping_statistics
from spartito.engine.randomness.global_randomness import RandomnessForbidden, replaying
from spartito.errors import UserError
from spartito.steps.prepared import Pair


class Computation(Protocol):
    """What this task does with a batch."""

    def enter(self, pairs: Sequence[Pair]) -> None:
        """A batch of these pairs comes next; all tasks call it.

        Raises:
            UserError: A model is not as it is to be.
        """
        ...

    def train(self, pair: Pair, batch: Batch, loss: LossFunction | None) -> Any:
        """Forward and backward pass of a batch; its gradients wait with those before.

        Returns:
            The output, None without rows.
        """
        ...

    def evaluate(self, pair: Pair, batch: Batch, loss: LossFunction | None) -> Evaluated:
        """As `Strategy.evaluate`."""
        ...

    def predict(self, pair: Pair, batch: Batch, has_loss: bool) -> Any:
        """As `Strategy.predict`."""
        ...

    def by_hand(self, call: str) -> WholeModel:
        """What computes in a loop of the user's own, who has called ``call``.

        Raises:
            UserError: No task could do that alone.
        """
        ...

    def complete(self, pair: Pair) -> None:
        """Before an update: add what other tasks of the model have of the gradients here."""
        ...


Evaluated = tuple[Number, Number, Any]
"""This task's sum of losses, its weight, and the output (None where it had no rows)."""


class Division(Protocol):
    """How batches are divided among those who compute them."""

    @property
    def device(self) -> torch.device:
        """Where this task computes."""
        ...

    @property
    def several(self) -> bool:
        """Whether the gradients of several tasks make one update."""
        ...

    @property
    def divides(self) -> bool:
        """Whether a loss is computed of parts of a global batch."""
        ...

    @property
    def runs_without_rows(self) -> bool:
        """Whether a forward pass is also made where there are no rows: others may wait in it."""
        ...

    def divisor(self, batch: Batch) -> float:
        """What a backward pass divides by."""
        ...

    def is_so_for_one(self, found: bool) -> bool:
        """Whether it is so for one of those who compute parts of this batch; all of them ask."""
        ...


class WholeModel:
    """A model whose forward pass this task runs from the first layer to the last.

    Args:
        division: How batches are divided.
        around: A block around each backward pass.
        run: Calls a model with a batch, as `forward` does; under ``deterministic`` that does, as
            random numbers belong to rows.
    """

    def __init__(
        self,
        division: Division,
        around: Callable[[], AbstractContextManager[object]] | None = None,
        run: Callable[[nn.Module, Any, bool], Any] = forward,
    ) -> None:
        self._division, self._around, self._run = division, around, run

    def enter(self, pairs: Sequence[Pair]) -> None:
        """As `Computation.enter`: whatever comes is computed."""

    def train(self, pair: Pair, batch: Batch, loss: LossFunction | None) -> Any:
        """As `Computation.train`.

        A replica without rows runs the model on spare ones, which count for nothing: others may
        wait for it in the forward pass, and what a module counts stays equal everywhere.
        """
        output = None
        if batch.size:
            output, found = self._forward(pair, batch, loss)
            self.backward([pair], found, batch)
        elif self._division.runs_without_rows:
            with keeping_statistics(pair.model), spare_rows():
                found = self._forward(pair, of_spare_rows(batch), loss)[1]
                self.backward([pair], structs.replace(found, weight=0.0), batch)
        else:
            pair.gradients.begin(self._division.divisor(batch))
        return output

    def evaluate(self, pair: Pair, batch: Batch, loss: LossFunction | None) -> Evaluated:
        """As `Computation.evaluate`."""
        has_rows = bool(batch.size)
        if not has_rows and not self._division.runs_without_rows:
            return 0.0, 0.0, None
        if self._division.divides:
            look_at_norms(pair)
        batch = in_dtype(batch if has_rows else of_spare_rows(batch), pair.dtype)
        spare = nullcontext() if has_rows else spare_rows()
        with torch.no_grad(), autocast(pair.precision, self._division.device), spare:
            if loss is None:
                output, found = self._look_at_own(pair, batch)
            else:
                output = self._output(pair, batch.data, True)
                found = look(loss, output, batch)
            found = self.looked_at(pair, loss, output, batch, found)
        if not has_rows:  # others may have waited for this pass; it counts for nothing
            return 0.0, 0.0, None
        return found.total, found.weight, output

    def predict(self, pair: Pair, batch: Batch, has_loss: bool) -> Any:
        """As `Computation.predict`."""
        if self._division.divides:
            look_at_norms(pair)
        runs_spare = not batch.size and self._division.runs_without_rows
        data = in_dtype(of_spare_rows(batch) if runs_spare else batch, pair.dtype).data
        spare = spare_rows() if runs_spare else nullcontext()
        with torch.no_grad(), autocast(pair.precision, self._division.device), spare:
            output = self._output(pair, data, has_loss)
        if runs_spare:
            output = no_rows(output)
        return output if has_loss else without_loss(output)

    def by_hand(self, call: str) -> WholeModel:
        """As `Computation.by_hand`."""
        return self

    def complete(self, pair: Pair) -> None:
        """As `Computation.complete`: they are complete."""

    def _forward(
        self, pair: Pair, batch: Batch, loss: LossFunction | None
    ) -> tuple[Any, WeightedLoss]:
        """The output for a batch with rows, and its loss."""
        batch = in_dtype(batch, pair.dtype)
        if pair.precision == "fp32" and pair.randomness is None:
            output = self._output(pair, batch.data, loss is not None)
            given = evaluate_loss(loss, output, batch)
            return output, self._weigh(pair, loss, output, given, batch)
        with autocast(pair.precision, self._division.device):
            output = self._output(pair, batch.data, loss is not None)
            divided = pair.randomness is not None and self._division.several
            with RandomnessForbidden() if divided else nullcontext():
                given = evaluate_loss(loss, output, batch)
            return output, self._weigh(pair, loss, output, given, batch)

    def _output(self, pair: Pair, data: Any, has_loss: bool) -> Any:
        """What the model says of a batch."""
        return (self._run if pair.randomness is None else forward)(pair.model, data, has_loss)

    def backward(
        self, pairs: Sequence[Pair], found: WeightedLoss, batch: Batch, divisor: float = 0.0
    ) -> None:
        """Add the gradients of a loss to those that wait.

        Args:
            pairs: Of whose parameters it may be a function.
            found: The loss.
            batch: Of which it is.
            divisor: What it is divided by; 0: what those are that wait.

        Raises:
            UserError: For what cannot learn so.
        """
        if not found.value.requires_grad:
            raise no_gradient()
        for pair in pairs if self._division.several else ():
            if new := pair.new:
                raise UserError(
                    f"{len(new)} parameters were put into the model after this batch was given "
                    "out: each replica computed with its own values of them",
                    "Change the model between two calls of fit, or before the loop takes a batch.",
                )
        if len(pairs) > 1 and any(pair.loss_scale.value != 1 for pair in pairs):
            raise UserError(
                f"a backward pass for {len(pairs)} prepared models with precision='fp16'",
                "Each has a loss scale of its own: choose bf16, or prepare one model.",
            )
        is_mean = divisor > 0
        planned = self._divisor(found, batch)
        for pair in pairs:
            own = pair.gradients.begin(divisor or planned)
            divisor = divisor or own
            if not is_mean:
                pair.gradients.rescale(divisor)
        counts = found.counts
        scale = found.scale / divisor if counts else 0.0
        gradient = pairs[0].loss_scale.scale(first_gradient(found.value, scale))
        draws = any(pair.has_drawn for pair in pairs)
        watched = [pair for pair in pairs if pair.randomness is not None and self._division.divides]
        try:
            if counts and not draws and not watched and self._around is None:
                backward(found.value, gradient)
            else:
                with ExitStack() as stack:
                    for pair in watched:
                        learns = pair.gradients.parameters
                        stack.enter_context(pair.hooks.watching(pair.names_by_id, learns))
                    for pair in () if counts else pairs:
                        stack.enter_context(pair.gradients.discarding())
                    if draws:
                        stack.enter_context(replaying())
                    if self._around is not None:
                        stack.enter_context(self._around())
                    backward(found.value, gradient)
        except BaseException:  # some parameters have a gradient of this pass, and some have not
            for pair in pairs:
                pair.forget()
            raise
        loss = found.total
        for pair in pairs:
            pair.gradients.add(loss, found.weight)

    def _divisor(self, found: WeightedLoss, batch: Batch) -> float:
        """What a backward pass divides by, which others have to know too, if there are any.

        Alone it is what the loss weighs: so nothing is left to be scaled in the update.
        """
        alone = not self._division.several and isinstance(found.weight, float | int)
        return (float(found.weight) if alone else 0.0) or self._division.divisor(batch)

    def looked_at(
        self,
        pair: Pair,
        loss: LossFunction | None,
        output: Any,
        batch: Batch,
        found: WeightedLoss,
        deterministic: bool | None = None,
    ) -> WeightedLoss:
        """``found``, unless parts of batches make no exact mean: that is refused, or said.

        Args:
            pair: Of whose training it is.
            loss: The user's function, if it is known.
            output: The model's.
            batch: Of which it is.
            found: Of this task's rows.
            deterministic: Whether numbers are to be those of one device; None: as of the pair.

        Raises:
            UserError: It is deterministic.
        """
        if self._division.divides:
            found = pair.comparisons.look(loss, output, batch, found)
            if found.doubt:
                refuses = pair.randomness is not None if deterministic is None else deterministic
                pair.comparisons.tell(found.doubt, refuses)
        return found

    def _look_at_own(self, pair: Pair, batch: Batch) -> tuple[Any, WeightedLoss]:
        """The output and the loss of a model that computes it.

        A graph that begins at a loss of torch's tells what that was divided by. Plain arithmetic
        has none, so then the graph of all layers is kept, which costs memory: of each batch from
        there on, as what one without padding is divided by says nothing of the next. Where there
        is no graph even so, that is what its doubt says.

        All replicas make that second pass, also those whose rows were clear: they may meet in it.
        """
        output, found = look_at_own(pair.model, batch, pair.looks_from_first or False)
        if pair.looks_from_first is None and self._division.is_so_for_one(found.is_guess):
            with listening(None):  # it has reported its figures
                output, found = look_at_own(pair.model, batch, from_first=True)
            pair.looks_from_first = found.value.requires_grad
        return output, found

    def _weigh(
        self, pair: Pair, loss: LossFunction | None, output: Any, given: Any, batch: Batch
    ) -> WeightedLoss:
        """The sum and weight of what ``loss`` said of ``output``."""
        return self.looked_at(pair, loss, output, batch, weigh(given, batch))


def look_at_norms(pair: Pair) -> None:
    """Before a model evaluates a part of a batch: refuse what depends on the part, or warn of it.

    Each time: who adapts a model to new data drops its statistics between two evaluations.

    Args:
        pair: The model's.

    Raises:
        UserError: The training is deterministic.
    """
    if not pair.norms_told:
        pair.norms_told = check_evaluation(pair.model, pair.randomness is not None)


_are_spare = False


@contextmanager
def spare_rows() -> Iterator[None]:
    """A block that computes with rows which count for nothing."""
    global _are_spare
    before, _are_spare = _are_spare, True
    try:
        yield
    finally:
        _are_spare = before


def are_spare() -> bool:
    """Whether what is computed now counts for nothing, also in what a model asks of others."""
    return _are_spare


def of_spare_rows(batch: Batch) -> Batch:
    """A batch without rows, with its spare rows as data.

    Args:
        batch: Any; one without spare rows stays as it is.
    """
    if batch.spare is None:
        return batch
    return structs.replace(batch, data=batch.spare, size=count_rows(batch.spare))


def no_rows(output: Any) -> Any:
    """An output as of a batch without rows.

    Args:
        output: Of spare rows.
    """
    return rows(output, lambda tensor: tensor[:0] if tensor.dim() else tensor)


def without_loss(output: Any) -> Any:
    """The output of a model that returns its loss beside it.

    Args:
        output: Whatever it returned.
    """
    if isinstance(output, Mapping):
        return {k: v for k, v in output.items() if k not in ("loss", "num_items")}
    return output


def no_gradient() -> UserError:
    """The error for a loss that nothing learns from."""
    return UserError(
        "the loss has no gradient: it depends on no parameter that learns",
        "Compute it from the model's output by differentiable functions of torch, "
        "and leave requires_grad on where it is to learn.",
    )
