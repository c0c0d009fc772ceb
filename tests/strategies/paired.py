"""A strategy for tests: each data shard has two processes, which meet in every forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective
from spartito.collectives.rendezvous import WORLD, Rendezvous
from spartito.strategies.groups import DATA, MODEL
from spartito.strategies.synchronous import SynchronousStrategy

WIDE = 2  # processes of a pair


class PairedStrategy(SynchronousStrategy):
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
