"""A strategy for tests: replicas that may share a GPU, which NCCL refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective
from spartito.collectives.rendezvous import Rendezvous
from spartito.steps.groups import one_shard_each
from spartito.steps.synchronous import SynchronousStep
from spartito.strategies import Strategy


@dataclass(frozen=True, eq=False)
class SharingStrategy(Strategy):
    """Replicas that may share a GPU."""

    name = "sharing"
    implementation = "tests.strategies.sharing:SharingStep"


class SharingStep(SynchronousStep):
    """DDP's engine on gloo, which brings tensors of a GPU through the host's memory."""

    name = "sharing"

    @staticmethod
    def connect(rendezvous: Rendezvous, cluster: ClusterSpec) -> Mapping[str, Collective]:
        rendezvous._device = torch.device("cpu")
        return one_shard_each(rendezvous, cluster)
