"""Strategies for tests: each data shard has two processes, which meet in every forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.checkpoint.cuts import BoxCut, Cut
from spartito.cluster.spec import ClusterSpec
from spartito.collectives.membership.rendezvous import WORLD, Rendezvous
from spartito.steps.exchanges.all_reduce import AllReduce
from spartito.steps.groups import DATA, MODEL
from spartito.steps.parts import Exchange, Parts, Prepared
from spartito.steps.placements.replicated import Replicated
from spartito.steps.prepared import Pair
from spartito.steps.team import Team
from spartito.steps.topology import Connected
from spartito.strategies import Strategy

WIDE = 2  # processes of a pair


@dataclass(frozen=True)
class TwoByTwo:
    """Ranks 2n and 2n + 1 read data shard n."""

    def shard(self, tasks: ClusterSpec) -> tuple[int, int]:
        return tasks.rank // WIDE, tasks.world_size // WIDE

    def connect(self, rendezvous: Rendezvous, cluster: ClusterSpec) -> Connected:
        first = cluster.rank - cluster.rank % WIDE
        return {
            WORLD: rendezvous.group(),
            DATA: rendezvous.group(DATA, range(cluster.rank % WIDE, cluster.world_size, WIDE)),
            MODEL: rendezvous.group(MODEL, range(first, first + WIDE)),
        }


class Meeting(Replicated):
    """A whole model on each process; every forward pass waits for all of them."""

    def prepared(self, pair: Pair, couple: Callable[[Pair], None]) -> None:
        pair.model.register_forward_pre_hook(self._meet)
        couple(pair)

    def _meet(self, model: nn.Module, given: Any) -> None:
        """All run the model as often as the others, also those without rows."""
        met = self._team.groups.world.all_reduce(torch.ones(1))
        assert met.item() == self._team.cluster.world_size


class Halved(Meeting):
    """As before, and each process of a pair has some rows only of every matrix, not as many."""

    def __init__(self, team: Team, exchange: Exchange) -> None:
        super().__init__(team, exchange)
        self._cut: dict[str, Cut] = {}

    def gradients(self, model: nn.Module, optimizer: Optimizer) -> Prepared:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                self._cut[f"{name}.weight"] = self._halve(module)
        return super().gradients(model, optimizer)

    def cuts(self, pair: Pair, section: str) -> Mapping[str, Cut]:
        return self._cut

    def fractions(self, pair: Pair, parameters: Sequence[nn.Parameter]) -> list[float]:
        cut = {name: name in self._cut for name, _ in pair.model.named_parameters()}
        names = {id(parameter): name for name, parameter in pair.model.named_parameters()}
        return [1.0 if cut[names[id(parameter)]] else 1 / WIDE for parameter in parameters]

    def _halve(self, layer: nn.Linear) -> Cut:
        group, shape = self._team.groups.model, tuple(layer.weight.shape)
        edges = [0, shape[0] // 2, shape[0]]
        own = slice(edges[group.rank], edges[group.rank + 1])
        layer.weight.data = layer.weight.data[own].clone()

        def forward(x: Tensor) -> Tensor:
            parts = group.all_gather_rows(layer.weight.detach())
            parts[group.rank] = layer.weight
            return nn.functional.linear(x, torch.cat(parts), layer.bias)

        layer.forward = forward  # type: ignore[method-assign,assignment]
        return BoxCut(shape, (own.start, 0), tuple(layer.weight.shape))


@dataclass(frozen=True, eq=False)
class PairedStrategy(Strategy):
    """Ranks 2n and 2n + 1 read data shard n; every forward pass waits for all processes."""

    name = "paired"

    def parts(self, team: Team) -> Parts:
        exchange = AllReduce(team)
        return Parts(TwoByTwo(), Meeting(team, exchange), exchange)


@dataclass(frozen=True, eq=False)
class CutStrategy(Strategy):
    """As before, and each process of a pair has some rows only of every matrix, not as many."""

    name = "cut"

    def parts(self, team: Team) -> Parts:
        exchange = AllReduce(team)
        return Parts(TwoByTwo(), Halved(team, exchange), exchange)
