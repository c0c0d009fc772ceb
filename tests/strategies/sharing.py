"""A strategy for tests: replicas that may share a GPU, which NCCL refuses."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective
from spartito.collectives.rendezvous import Rendezvous
from spartito.strategies.groups import one_shard_each
from spartito.strategies.synchronous import SynchronousStrategy


class SharingStrategy(SynchronousStrategy):
    """DDP's engine on gloo, which brings tensors of a GPU through the host's memory."""

    name = "sharing"

    @staticmethod
    def connect(rendezvous: Rendezvous, cluster: ClusterSpec) -> Mapping[str, Collective]:
        rendezvous._device = torch.device("cpu")
        return one_shard_each(rendezvous, cluster)
