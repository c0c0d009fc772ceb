"""A strategy for tests: each data shard has two processes, which meet in every forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.checkpoint.boxes import BoxCut, Cut
from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective
from spartito.collectives.rendezvous import WORLD, Rendezvous
from spartito.engine.gradients import Gradients
from spartito.steps.groups import DATA, MODEL
from spartito.steps.pair import Pair
from spartito.steps.synchronous import SynchronousStep
from spartito.strategies import Strategy

WIDE = 2  # processes of a pair


@dataclass(frozen=True, eq=False)
class PairedStrategy(Strategy):
    """Ranks 2n and 2n + 1 read data shard n; every forward pass waits for all processes."""

    name = "paired"
    implementation = "tests.strategies.paired:PairedStep"


@dataclass(frozen=True, eq=False)
class CutStrategy(Strategy):
    """As before, and each process of a pair has some rows only of every matrix, not as many."""

    name = "cut"
    implementation = "tests.strategies.paired:CutStep"


class PairedStep(SynchronousStep):
    """Ranks 2n and 2n + 1 read data shard n; every forward pass waits for all processes."""

    name = "paired"

    @property
    def data_shard(self) -> tuple[int, int]:
        return self.cluster.rank // WIDE, self.cluster.world_size // WIDE

    @staticmethod
    def connect(rendezvous: Rendezvous, cluster: ClusterSpec) -> Mapping[str, Collective]:
        first = cluster.rank - cluster.rank % WIDE
        return {
            WORLD: rendezvous.group(),
            DATA: rendezvous.group(DATA, range(cluster.rank % WIDE, cluster.world_size, WIDE)),
            MODEL: rendezvous.group(MODEL, range(first, first + WIDE)),
        }

    def prepare(
        self, model: nn.Module, optimizer: Any, **options: Any
    ) -> tuple[nn.Module, Optimizer]:
        found = super().prepare(model, optimizer, **options)
        found[0].register_forward_pre_hook(self._meet)
        return found

    def _meet(self, model: nn.Module, given: Any) -> None:
        """All run the model as often as the others, also those without rows."""
        met = self.groups.world.all_reduce(torch.ones(1))
        assert met.item() == self.cluster.world_size


class CutStep(PairedStep):
    """As before, and each process of a pair has some rows only of every matrix, not as many."""

    name = "cut"

    def _gradients(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Gradients]:
        self._cut: dict[str, Cut] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                self._cut[f"{name}.weight"] = self._halve(module)
        return super()._gradients(model, optimizer)

    def _halve(self, layer: nn.Linear) -> Cut:
        group, shape = self.groups.model, tuple(layer.weight.shape)
        edges = [0, shape[0] // 2, shape[0]]
        own = slice(edges[group.rank], edges[group.rank + 1])
        layer.weight.data = layer.weight.data[own].clone()

        def forward(x: Tensor) -> Tensor:
            parts = group.all_gather_rows(layer.weight.detach())
            parts[group.rank] = layer.weight
            return nn.functional.linear(x, torch.cat(parts), layer.bias)

        layer.forward = forward  # type: ignore[method-assign,assignment]
        return BoxCut(shape, (own.start, 0), tuple(layer.weight.shape))

    def _cuts(self, pair: Pair, section: str) -> Mapping[str, Cut]:
        return self._cut
