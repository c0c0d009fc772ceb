"""One model and its optimizer, as a strategy keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.engine.devices.precision import LossScale
from spartito.engine.drift import ROUNDING, DriftedError
from spartito.engine.gradients.gradient_edits import Edits
from spartito.engine.gradients.gradient_hooks import GradientHooks
from spartito.engine.gradients.gradient_sum import Accumulated, Gradients, same
from spartito.engine.losses.loss_halves import Comparisons
from spartito.engine.modules.step_undo import Undo
from spartito.engine.randomness.global_randomness import GlobalRandomness
from spartito.engine.step_context import current
from spartito.engine.updates.optimizers import optimizer_parameters, unwrap
from spartito.errors import UserError
from spartito.steps.loop_batches import LoopBatches, LoopState


class LossGap:
    """How far the losses of the tasks of one model were apart, beyond rounding; 0: they were not.

    They are the same numbers, so the gap says that the loss sees one task's part of the model.
    """

    def __init__(self) -> None:
        self._gap: Tensor | None = None

    def look(self, losses: Tensor) -> None:
        """Take note of the losses of an update, one a task; nobody waits for a device."""
        losses = losses.nan_to_num()
        gap = losses.max() - losses.min()
        gap = gap * (gap > ROUNDING * losses.abs().max())
        self._gap = gap if self._gap is None else torch.maximum(self._gap, gap)

    def check(self) -> None:
        """Refuse a gap since the last check; all tasks of the model find the same.

        Raises:
            DriftedError: How large it is.
        """
        gap, self._gap = self._gap, None
        if gap is not None and (found := gap.item()):
            raise DriftedError(
                f"the tasks of one model have different losses, up to {found:.3g} apart",
                "A loss of parameters that is computed outside of forward(), as a penalty over "
                "net.parameters(), sees one task's shards: compute it in forward(), or use the "
                "optimizer's weight_decay.",
            )


@dataclass
class Pair:
    """A prepared model, its optimizer, and what an update of it has to do."""

    model: nn.Module
    optimizer: Optimizer
    gradients: Gradients
    accumulate: int
    clip_norm: float | None
    precision: str
    dtype: torch.dtype | None  # what floating data is cast to: that of all parameters, if one
    shared: dict[int, Tensor]  # by id: the chief's values of these have come to all replicas
    seed: int
    randomness: GlobalRandomness | None  # where training is deterministic
    loss_scale: LossScale
    synchronized: bool = False  # its BatchNorm is one over the global batch
    passes: int = 0
    is_compared: bool = False  # its buffers, after the first update
    norms_told: bool = False  # whether it was said that figures depend on parts of batches
    hooks: GradientHooks = field(default_factory=GradientHooks)
    comparisons: Comparisons = field(default_factory=Comparisons)
    loss: nn.Module | None = None  # a module that its steps have as loss
    looks_from_first: bool | None = None  # at a loss of the model's own: what all its layers tell
    reports_norm: bool = False  # whether the norm of each update's gradients is a figure
    skips_nonfinite: bool = False  # updates whose loss or gradients are not finite, on all tasks
    norm: Tensor | None = None  # that of the last update
    kept: Undo | None = None  # what was in the buffers
    saved: dict[str, Any] | None = None  # what `accumulated` returned for a checkpoint
    taken: int = 0  # how many of its gradients another optimizer's update has cleared
    losses: LossGap = field(default_factory=LossGap)
    order: list[str] = field(default_factory=list)  # of its names, where this task has not all
    looks_beyond: bool = field(init=False)  # at what other replicas have of a batch
    _known: list[nn.Parameter] = field(default_factory=list)  # all of the optimizer's, none new

    def __post_init__(self) -> None:
        self.edits = Edits(self.optimizer, self.randomness is not None)
        self.looks_beyond = self.synchronized or self.randomness is not None

    @property
    def has_drawn(self) -> bool:
        """Whether passes since its last update, or of this batch, drew one device's numbers."""
        if self.randomness is None:
            return False
        context = current()
        return self.randomness.ran or (context is not None and context.calls > 0)

    @property
    def new(self) -> list[nn.Parameter]:
        """The parameters that the optimizer has got since."""
        given = optimizer_parameters(self.optimizer)
        if same(given, self._known):
            return []
        found = [parameter for parameter in given if id(parameter) not in self.shared]
        self._known = [] if found else given
        return found

    def names_by_id(self) -> dict[int, str]:
        """The user's names of the parameters."""
        return {id(p): name for name, p in unwrap(self.model).named_parameters()}

    def forget(self) -> None:
        """Have computed nothing of the next update."""
        self.gradients.clear()
        self.passes = 0

    def keep_buffers(self) -> None:
        """Remember what is in the buffers before the forward passes of an update."""
        self.kept = self.kept or Undo(unwrap(self.model))
        self.kept.end()
        self.kept.begin(looks=True)

    def restore_buffers(self) -> None:
        """Undo what those have written: it may be as little finite as what was computed."""
        if self.kept is not None:
            self.kept.undo()

    def accumulated(self) -> dict[str, Any]:
        """What the batches since the last update have left, equal on all replicas."""
        waiting = self.gradients.accumulated()
        grads = zip(self._names, waiting.grads, strict=True)
        scale = self.loss_scale.value
        return {
            "gradients": {name: grad / scale for name, grad in grads if grad is not None},
            "divisor": waiting.loss_divisor,
            "weight": waiting.weight,
            "loss": waiting.loss,
            "batches": self.passes,
            "accumulate": self.accumulate,
        }

    def go_on_accumulating(self, rank: int) -> None:
        """Take up what `accumulated` returned for a checkpoint, under any number of replicas."""
        saved = self.saved
        if saved is None:
            raise UserError("a position between the batches of an update, which was not loaded")
        if saved["accumulate"] != self.accumulate:
            raise UserError(
                f"the checkpoint was written after {saved['batches']} of {saved['accumulate']} "
                f"batches of an update, and accumulate={self.accumulate} now",
                "Go on with the same, or begin a whole epoch: fit(..., initial_epoch=N).",
            )
        self.gradients.refresh()
        scale, found = self.loss_scale.value, map(saved["gradients"].get, self._names)
        grads = [None if grad is None else grad * scale for grad in found]
        waiting = Accumulated(grads, saved["divisor"], saved["weight"], saved["loss"])
        self.gradients.load_accumulated(waiting, rank)
        self.passes, self.saved = saved["batches"], None

    @property
    def _names(self) -> list[str]:
        """The user's names of what learns."""
        names = {id(p): name for name, p in unwrap(self.model).named_parameters()}
        return [names[id(parameter)] for parameter in self.gradients.parameters]


def tensors_of(model: nn.Module) -> dict[int, Tensor]:
    """The parameters and buffers of a model by id.

    Args:
        model: With whatever wraps it.
    """
    return {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}


def check_unchanged(pair: Pair) -> None:
    """Refuse gradients that others than the strategy have changed, or warn; see `Edits`."""
    if pair.passes and not pair.gradients.backward_calls:
        return  # they are of `step`
    for parameter in pair.edits.changed(pair.gradients.parameters):
        names = {id(p): name for name, p in unwrap(pair.model).named_parameters()}
        name = names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")
        pair.edits.tell(name)
        return


def check_taken(pair: Pair) -> None:
    """Refuse an update whose gradients another optimizer's update has cleared."""
    if pair.taken:
        raise UserError(
            f"an update of {type(pair.optimizer).__name__}, and {pair.taken} of its parameters "
            "have lost their gradients: another optimizer has them too, and its update cleared "
            "them",
            "Give each parameter to one optimizer, or call strategy.backward before each update.",
        )


def take(parameters: Sequence[nn.Parameter], others: Sequence[Pair]) -> None:
    """Note that an update clears these parameters' gradients, which ``others`` may wait for."""
    used = {id(parameter) for parameter in parameters if parameter.grad is not None}
    for pair in others:
        if pair.gradients.backward_calls:
            pair.taken += sum(id(parameter) in used for parameter in pair.gradients.parameters)


class Pairs:
    """All that a strategy has prepared, and which of it is meant."""

    def __init__(self) -> None:
        self.all: list[Pair] = []
        self.used: Pair | None = None
        self.state = LoopState()
        self.batches = LoopBatches(self.state)

    @property
    def unseen(self) -> bool:
        """Whether a loop of the user's own got batches since the replicas were compared last."""
        return self.state.unseen

    @unseen.setter
    def unseen(self, unseen: bool) -> None:
        self.state.unseen = unseen

    def add(self, pair: Pair) -> None:
        """Keep a pair, in place of an older one with the same optimizer."""
        self.all = [*(other for other in self.all if other.optimizer is not pair.optimizer), pair]

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is of a model that was prepared."""
        return any(id(parameter) in pair.shared for pair in self.all)

    @property
    def in_use(self) -> list[Pair]:
        """The pair that is meant, else all."""
        return self.all if self.used is None else [self.used]

    @property
    def only(self) -> Pair:
        """The pair that is meant; `UserError` where that is not clear."""
        return self.meant("step()")

    def meant(self, call: str) -> Pair:
        """The pair that a call is about.

        Args:
            call: What the user has called, for the error.

        Raises:
            UserError: Nothing was prepared, or several models were and none is named.
        """
        if self.used is not None:
            return self.used
        if not self.all:
            raise UserError(
                f"{call} before prepare()",
                "First: model, optimizer = strategy.prepare(model, optimizer). Then "
                "strategy.load(path), and the loop.",
            )
        if len(self.all) > 1:
            other = " Or use backward() and update()." if call == "step()" else ""
            raise UserError(
                f"{call} with {len(self.all)} prepared models",
                f"Say which: with strategy.using(optimizer).{other}",
            )
        return self.all[0]

    def sharing(self, optimizer: Optimizer) -> list[Pair]:
        """The pairs of other optimizers that have some of this one's parameters too."""
        others = [pair for pair in self.all if pair.optimizer is not optimizer]
        own = {id(parameter) for parameter in optimizer_parameters(optimizer)} if others else set()
        return [
            pair
            for pair in others
            if not own.isdisjoint(map(id, optimizer_parameters(pair.optimizer)))
        ]

    def of(self, optimizer: Optimizer) -> Pair:
        """The pair of a prepared optimizer."""
        for pair in self.all:
            if pair.optimizer is optimizer:
                return pair
        raise UserError(
            f"an {type(optimizer).__name__} that was not prepared",
            "Use the one that strategy.prepare returned.",
        )

    @contextmanager
    def using(self, optimizer: Optimizer) -> Iterator[None]:
        """A block in which the pair of ``optimizer`` is meant."""
        before, self.used = self.used, self.of(optimizer)
        try:
            yield
        finally:
            self.used = before
