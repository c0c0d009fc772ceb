"""Equal copies on the devices of one machine."""

from __future__ import annotations

from spartito.cluster.spec import ClusterSpec
from spartito.errors import UserError
from spartito.strategies.synchronous import SynchronousStrategy


class MirroredStrategy(SynchronousStrategy):
    """One replica per process, all on this machine: shared memory on CPUs, NCCL on GPUs."""

    name = "mirrored"

    def check(self, cluster: ClusterSpec) -> None:
        if cluster.local_size < cluster.num_replicas:
            raise UserError(
                f"mirrored with {cluster.local_size} of {cluster.num_replicas} replicas "
                "on this machine",
                "Choose multi_worker_mirrored for replicas on several machines.",
            )
