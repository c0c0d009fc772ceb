"""A strategy for tests: two processes compute each data shard, and talk in every forward pass."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective
from spartito.collectives.shared_memory import SharedMemoryCollective
from spartito.strategies.groups import DATA, MODEL, WORLD
from spartito.strategies.synchronous import SynchronousStrategy

WIDE = 2  # processes of a pair


class PairedStrategy(SynchronousStrategy):
    """Ranks 2n and 2n + 1 read data shard n; every forward pass waits for all processes."""

    name = "paired"

    @property
    def data_shard(self) -> tuple[int, int]:
        return self.cluster.rank // WIDE, self.cluster.world_size // WIDE

    @classmethod
    def connect(
        cls, cluster: ClusterSpec, device: torch.device, timeout: float, communication: str
    ) -> dict[str, Collective]:
        groups = super().connect(cluster, device, timeout, communication)
        world, rank = groups[WORLD], cluster.rank
        folder = tempfile.mkdtemp() if rank == 0 else ""
        path = Path(world.all_gather_bytes(folder.encode())[0].decode()) / "store"
        store = dist.FileStore(str(path), cluster.world_size)
        data = range(rank % WIDE, cluster.world_size, WIDE)
        model = range(rank - rank % WIDE, rank - rank % WIDE + WIDE)
        for name, members in ((DATA, data), (MODEL, model)):
            own = dist.PrefixStore(f"{name} {members}", store)
            names = [cluster.name_of(member) for member in members]
            groups[name] = SharedMemoryCollective(members.index(rank), names, own, timeout)
        return groups

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
