"""What a step is made of: parts that can be read, tested and exchanged alone.

======== =====================================================================================
topology Which tasks are connected, and whose data shard is which? (`spartito.steps.topology`)
placement Where do a model's tensors lie?
computation How does this task compute a batch with them? (`spartito.steps.placements.computation`)
exchange How do gradients become an update?
outer    When and how do groups of replicas agree? (`spartito.steps.outer_loops.outer_loop`)
recovery What is kept elsewhere, and who brings it back? (`spartito.steps.recovery`)
======== =====================================================================================

A strategy declares them, `spartito.steps.step.Step` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.checkpoint.cuts import Cut, NestedCut
from spartito.checkpoint.saved_state import Saved
from spartito.engine.gradients.gradient_sum import Gradients
from spartito.errors import UserError
from spartito.outer.group_values import Values
from spartito.outer.joined_groups import JoinedGroups
from spartito.steps.coordination import Account, Agreement
from spartito.steps.placements.computation import Computation
from spartito.steps.prepared import Pair
from spartito.steps.recovery import EndsWithLoss, Recovering
from spartito.steps.topology import Topology

State = dict[str, Any]
"""Sections of a checkpoint, with this task's own tensors, under the user's names."""
Prepared = tuple[nn.Module, Gradients]
"""The module to call, and what waits for the optimizer's next update."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for of a model and its optimizer, as `Strategy.prepare` tells."""

    accumulate: int = 1
    clip_norm: float | None = None
    precision: str = "fp32"
    deterministic: bool = False
    seed: int = 0

    def check(self) -> None:
        """Refuse what no model can be trained with.

        Raises:
            UserError: It says what.
        """
        batches: object = self.accumulate
        norm: object = self.clip_norm
        if not isinstance(batches, Integral):
            raise UserError(f"accumulate={batches!r}", "Give a whole number of batches.")
        if self.accumulate < 1:
            raise UserError(f"accumulate={batches}", "At least one batch makes an update.")
        if not isinstance(norm, Real | None):
            raise UserError(f"clip_norm={norm!r}", "Give a number, or None.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"clip_norm={norm}", "The norm of a gradient is above 0.")
        if self.deterministic not in (True, False):
            raise UserError(f"deterministic={self.deterministic!r}", "Give True or False.")


class Held(Protocol):
    """What this task has of a model and its optimizer, for checkpoints."""

    def cuts(self, pair: Pair, section: str) -> Mapping[str, Cut]:
        """What this task has a part of only, by the user's names: see `spartito.checkpoint.cuts`.

        Args:
            pair: A prepared one.
            section: "model", "optimizer" or "accumulated".
        """
        ...

    def owned(self, pair: Pair) -> set[str] | None:
        """The names of the parameters whose state of the optimizer is here, or a part of it.

        Args:
            pair: A prepared one.

        Returns:
            None where every task has all of it; that is so on all of them, or on none.
        """
        ...

    def showing(self) -> AbstractContextManager[None]:
        """A block in which models show what this task has of them, and not what that stands for."""
        ...

    def save(self, pair: Pair, state: Callable[[], State]) -> State:
        """What ``state`` returns, called when all that is here is there to be saved.

        Args:
            pair: A prepared one; all tasks call it.
            state: Puts together model, optimizer and gradients that wait.
        """
        ...

    def load(self, pair: Pair, saved: Saved, load: Callable[[Saved], None]) -> None:
        """Have ``load`` take what was saved, now or when it is known what of it belongs here.

        Args:
            pair: A prepared one; all tasks call it.
            saved: By any strategy.
            load: Reads this task's part into model and optimizer.
        """
        ...


class Placement(Held, Protocol):
    """Where the tensors of a model lie; it gives what it has placed to its exchange."""

    @property
    def computation(self) -> Computation:
        """How a batch is computed with them."""
        ...

    @property
    def agreement(self) -> Agreement:
        """What tasks compare of it."""
        ...

    @property
    def account(self) -> Account:
        """What is told of it."""
        ...

    @property
    def fraction(self) -> float:
        """The part of the optimizer's state that is here."""
        ...

    def check(self, model: nn.Module, settings: Settings) -> None:
        """Refuse what cannot be placed, before anything is changed; all tasks call it.

        Raises:
            UserError: It says what, and what to do.
        """
        ...

    def lay_out(self, model: nn.Module) -> None:
        """Give a model that was made without values those that this task keeps; all call it."""
        ...

    def bring(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """Bring the chief's values to all, and leave here what belongs here; all tasks call it.

        Args:
            model: With whatever wraps it.
            tensors: Parameters and buffers of it: all, or those that came later.
        """
        ...

    def gradients(self, model: nn.Module, optimizer: Optimizer) -> Prepared:
        """What waits for the optimizer's next update; all tasks call it, also after a loss."""
        ...

    def prepared(self, pair: Pair, couple: Callable[[Pair], None]) -> None:
        """Call ``couple`` once it is known what this task has of a pair: mostly at once."""
        ...

    def fractions(self, pair: Pair, parameters: Sequence[nn.Parameter]) -> list[float]:
        """What each parameter here counts for in a sum over the tasks of one model.

        Returns:
            Of each 1 over the tasks that have the same.
        """
        ...


class Exchange(Held, Protocol):
    """How the gradients of replicas become one update."""

    @property
    def agreement(self) -> Agreement:
        """What tasks compare of it."""
        ...

    @property
    def brings(self) -> bool:
        """Whether `begin` brings the chief's values of parameters itself."""
        ...

    @property
    def divides(self) -> bool:
        """Whether tasks have gradients of different parameters."""
        ...

    @property
    def fraction(self) -> float:
        """The part of the optimizer's state that is here."""
        ...

    def check(self, optimizer: object, settings: Settings) -> None:
        """Refuse what cannot be updated so, before anything is changed.

        Args:
            optimizer: An optimizer, or what makes one.
            settings: What was asked for.

        Raises:
            UserError: It says what, and what to do.
        """
        ...

    def begin(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """Take in parameters that lie where they belong; all tasks call it."""
        ...

    def gradients(self, model: nn.Module, optimizer: Optimizer) -> Prepared:
        """As `Placement.gradients`."""
        ...

    def stepping(self, pair: Pair) -> AbstractContextManager[None]:
        """A block of forward and backward passes that an update may follow."""
        ...

    def optimize(self, pair: Pair) -> None:
        """Let the optimizer use the reduced gradients; all replicas call it."""
        ...

    def values(self, pair: Pair, column: JoinedGroups, whole: Callable[[], Values]) -> Values:
        """What this task has of a pair's parameters, for groups that merge them.

        Args:
            pair: A prepared one.
            column: Those who have the same, by their groups.
            whole: Makes those of a task that has all values.
        """
        ...


class Whole:
    """`Held` of a task that has all of model and optimizer, as the others do."""

    def cuts(self, pair: Pair, section: str) -> Mapping[str, Cut]:
        """Nothing is cut."""
        return {}

    def owned(self, pair: Pair) -> set[str] | None:
        """All."""
        return None

    def showing(self) -> AbstractContextManager[None]:
        """They do."""
        return nullcontext()

    def save(self, pair: Pair, state: Callable[[], State]) -> State:
        """All is there."""
        return state()

    def load(self, pair: Pair, saved: Saved, load: Callable[[Saved], None]) -> None:
        """It belongs here."""
        load(saved)


@dataclass(frozen=True)
class Parts:
    """What the steps of a strategy are made of, on this task."""

    topology: Topology
    placement: Placement
    exchange: Exchange
    recovery: Recovering = field(default_factory=EndsWithLoss)

    def cuts(self, pair: Pair, section: str) -> dict[str, Cut]:
        """As `Held.cuts`, of a model that both may have cut.

        Args:
            pair: A prepared one.
            section: "model", "optimizer" or "accumulated".
        """
        found = dict(self.placement.cuts(pair, section))
        for name, span in self.exchange.cuts(pair, section).items():
            found[name] = NestedCut(found[name], span) if name in found else span
        return found

    @contextmanager
    def showing(self) -> Generator[None]:
        """As `Held.showing`."""
        with self.placement.showing(), self.exchange.showing():
            yield

    def owned(self, pair: Pair) -> set[str] | None:
        """As `Held.owned`.

        Args:
            pair: A prepared one.
        """
        found = self.exchange.owned(pair)
        return self.placement.owned(pair) if found is None else found
