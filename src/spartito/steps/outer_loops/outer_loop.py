"""When and how groups of replicas agree: the outer loop around the steps of one group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from spartito.checkpoint.cuts import Cut
from spartito.checkpoint.saved_state import Saved
from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective
from spartito.collectives.membership.rendezvous import Rendezvous
from spartito.data.dataset import Dataset
from spartito.outer.group_values import Values
from spartito.outer.joined_groups import JoinedGroups
from spartito.steps.batches import Placed
from spartito.steps.distributed import StepResult
from spartito.steps.groups import DATA, REPLICAS, Connect
from spartito.steps.prepared import Pair
from spartito.steps.recovery import Copies, InReplicas

if TYPE_CHECKING:
    from spartito.steps.team import Team


Found = Mapping[str, Collective]
"""Groups by their names."""
MakeValues = Callable[[Pair, JoinedGroups], Values]
"""Makes what this task has of a pair's parameters, by those of other groups who have the same."""
Here = tuple[Mapping[str, Cut], set[str]]
"""How the state of an optimizer is cut, and the names of the parameters of which it is here."""


class OuterLoop(Protocol):
    """What stands around the steps of a group; these do not know which one it is.

    Attributes:
        name: Of the strategy that it makes; "" where it makes none.
    """

    name: str

    def inside(self, cluster: ClusterSpec) -> ClusterSpec:
        """The tasks of one's own group, by their rank in it. Pure.

        Raises:
            UserError: The job cannot have such groups.
        """
        ...

    def connect(self, rendezvous: Rendezvous, cluster: ClusterSpec, inner: Connect) -> Found:
        """Find this task's groups; ``inner`` finds those inside of one's own."""
        ...

    def data_shard(self, own: tuple[int, int], cluster: ClusterSpec) -> tuple[int, int]:
        """Which data shard of the job ``own`` of the group is, as (index, count)."""
        ...

    def divided(self, chain: Dataset, pairs: Sequence[Pair]) -> Dataset:
        """A training's data, cut among the groups first."""
        ...

    def check(self, model: nn.Module, precision: str, team: Team) -> None:
        """Before a model is prepared: refuse what differs between groups; all tasks call it."""
        ...

    def add(self, pair: Pair, team: Team, values: MakeValues) -> None:
        """Couple the groups of a pair that was prepared; all tasks call it.

        ``values`` makes what a task has of it.
        """
        ...

    def placed(self, found: Placed, training: bool) -> Placed:
        """The batches of a data shard, for a training or an evaluation."""
        ...

    def copies(self, team: Team) -> Copies:
        """Where the state of a lost replica is found.

        Raises:
            UserError: Nowhere, in such groups.
        """
        ...

    def begin(self) -> None:
        """A batch of a training comes next."""
        ...

    def telling(self) -> AbstractContextManager[None]:
        """A block whose error the other groups hear of."""
        ...

    def update(self, pair: Pair, update: Callable[[], StepResult]) -> StepResult:
        """Make an update of one's own group, and what is due with the others behind it."""
        ...

    def meet_due(self) -> bool:
        """Hold a meeting that was put off until its update counts; whether an end was asked for."""
        ...

    def flush(self, pair: Pair) -> None:
        """An epoch is over: all agree."""
        ...

    def tell_length(self, updates: int) -> None:
        """An epoch is going to have so many updates."""
        ...

    def saved(self, pair: Pair, state: dict[str, Any], cuts: Mapping[str, Cut]) -> dict[str, Any]:
        """The state of a pair, with what each group alone has; all tasks call it."""
        ...

    def load(self, pair: Pair, saved: Saved, here: Callable[[], Here]) -> None:
        """Go on where a checkpoint was, whose model is in place; all tasks call it.

        ``here`` tells what of the optimizer this task has.
        """
        ...

    # What the tasks agree on beside the computation.

    def has(self, pair: Pair) -> bool:
        """Whether groups may have each something of their own of a pair; equal on all tasks."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether all replicas are in one group."""
        ...

    @property
    def is_apart(self) -> bool:
        """Whether models show different values in each group now; equal on all tasks."""
        ...

    def show(self, pairs: Sequence[Pair]) -> None:
        """Let models have what all groups have together; all tasks call it."""
        ...

    def describe(self) -> dict[str, Any]:
        """What a run's settings tell of it, as JSON."""
        ...

    def figures(self, own: Sequence[float], pairs: Sequence[Pair]) -> dict[str, float]:
        """What an epoch came to, equal on all tasks, which all call it."""
        ...

    def waits(self) -> dict[str, float]:
        """Seconds of the epoch in which this task waited for other groups."""
        ...


class EveryStep:
    """There is one group: all agree in every step."""

    name = ""
    is_whole = True
    is_apart = False

    def inside(self, cluster: ClusterSpec) -> ClusterSpec:
        """All."""
        return cluster

    def connect(self, rendezvous: Rendezvous, cluster: ClusterSpec, inner: Connect) -> Found:
        """Those of the strategy itself."""
        found = inner(rendezvous, cluster)
        return {REPLICAS: found[DATA], **found}

    def data_shard(self, own: tuple[int, int], cluster: ClusterSpec) -> tuple[int, int]:
        """The same."""
        return own

    def divided(self, chain: Dataset, pairs: Sequence[Pair]) -> Dataset:
        """As it is."""
        return chain

    def check(self, model: nn.Module, precision: str, team: Team) -> None:
        """All is well."""

    def add(self, pair: Pair, team: Team, values: MakeValues) -> None:
        """There is nothing to couple."""

    def placed(self, found: Placed, training: bool) -> Placed:
        """As they are."""
        return found

    def copies(self, team: Team) -> Copies:
        """In all others."""
        return InReplicas(team)

    def begin(self) -> None:
        """Nothing has to be taken back."""

    def telling(self) -> AbstractContextManager[None]:
        """There is nobody else."""
        return nullcontext()

    def update(self, pair: Pair, update: Callable[[], StepResult]) -> StepResult:
        """That is all."""
        return update()

    def meet_due(self) -> bool:
        """There is none."""
        return False

    def flush(self, pair: Pair) -> None:
        """All agree already."""

    def tell_length(self, updates: int) -> None:
        """They do in any epoch."""

    def saved(self, pair: Pair, state: dict[str, Any], cuts: Mapping[str, Cut]) -> dict[str, Any]:
        """That is all."""
        return state

    def load(self, pair: Pair, saved: Saved, here: Callable[[], Here]) -> None:
        """There is nothing more."""

    def has(self, pair: Pair) -> bool:
        """There is only one."""
        return False

    def show(self, pairs: Sequence[Pair]) -> None:
        """They do."""

    def describe(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def figures(self, own: Sequence[float], pairs: Sequence[Pair]) -> dict[str, float]:
        """None."""
        return {}

    def waits(self) -> dict[str, float]:
        """None."""
        return {}
