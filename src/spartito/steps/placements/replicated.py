"""The placement of equal copies: each replica has all of the model in its own memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.engine.meta.meta_models import make_all, make_buffers
from spartito.engine.updates.optimizers import check_whole
from spartito.steps.coordination import Alike
from spartito.steps.groups import send
from spartito.steps.parts import Exchange, Parts, Prepared, Settings, Whole
from spartito.steps.placements.computation import Computation, WholeModel
from spartito.steps.prepared import Pair
from spartito.steps.recovery import EndsWithLoss, Recovering, Regrouping
from spartito.steps.team import Team
from spartito.steps.topology import OneShardEach


class Replicated(Whole):
    """A whole model on each task.

    Args:
        team: The replicas.
        exchange: What makes an update of their gradients.
        computation: How they compute; None: as any torch module is.
    """

    agreement = account = Alike()
    fraction = 1.0

    def __init__(
        self, team: Team, exchange: Exchange, computation: Computation | None = None
    ) -> None:
        self._team, self._exchange = team, exchange
        self.computation: Computation = computation or WholeModel(team)

    def check(self, model: nn.Module, settings: Settings) -> None:
        """As `Placement.check`: nobody has cut the model before."""
        check_whole(model)

    def lay_out(self, model: nn.Module) -> None:
        """As `Placement.lay_out`."""
        if self._exchange.brings:
            make_buffers(model)
            self._exchange.begin(model, list(model.parameters()))
        else:
            make_all(model)

    def bring(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """As `Placement.bring`."""
        sent = tensors
        if self._exchange.brings:
            sent = [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]
        if self._team.cluster.world_size > 1:
            with self._team.coordination.during("prepare"):
                send(self._team.groups.world, sent)
        self._exchange.begin(model, tensors)

    def gradients(self, model: nn.Module, optimizer: Optimizer) -> Prepared:
        """As `Placement.gradients`."""
        return self._exchange.gradients(model, optimizer)

    def prepared(self, pair: Pair, couple: Callable[[Pair], None]) -> None:
        """As `Placement.prepared`: at once."""
        couple(pair)

    def fractions(self, pair: Pair, parameters: Sequence[nn.Parameter]) -> list[float]:
        """As `Placement.fractions`: all tasks of a model have each."""
        return [1.0 / self._team.model.world_size] * len(parameters)


def replicas(team: Team, exchange: Exchange, computation: Computation | None = None) -> Parts:
    """The parts of a strategy whose replicas each have a data shard, and all of the model.

    Args:
        team: The replicas.
        exchange: What makes an update of their gradients.
        computation: How they compute; None: as any torch module is.
    """
    placement = Replicated(team, exchange, computation)
    recovery: Recovering = EndsWithLoss()
    if team.recovery is not None:
        recovery = Regrouping(team, team.outer.copies(team), placement.gradients, exchange)
    return Parts(OneShardEach(), placement, exchange, recovery)
