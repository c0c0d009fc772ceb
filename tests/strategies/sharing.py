"""A strategy for tests: replicas that may share a GPU, which NCCL refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from spartito.cluster.spec import ClusterSpec
from spartito.collectives.rendezvous import Rendezvous
from spartito.steps.all_reduce import AllReduce
from spartito.steps.parts import Parts
from spartito.steps.replicated import replicas
from spartito.steps.team import Team
from spartito.steps.topology import Connected, OneShardEach
from spartito.strategies import Strategy


@dataclass(frozen=True)
class ByHost(OneShardEach):
    """gloo, which brings tensors of a GPU through the host's memory."""

    def connect(self, rendezvous: Rendezvous, cluster: ClusterSpec) -> Connected:
        rendezvous._device = torch.device("cpu")
        return super().connect(rendezvous, cluster)


@dataclass(frozen=True, eq=False)
class SharingStrategy(Strategy):
    """Replicas that may share a GPU: DDP's engine on gloo."""

    name = "sharing"

    def parts(self, team: Team) -> Parts:
        return replace(replicas(team, AllReduce(team)), topology=ByHost())
