"""Equal copies on several machines."""

from __future__ import annotations

from spartito.cluster.spec import ClusterSpec
from spartito.errors import UserError
from spartito.strategies.synchronous import SynchronousStrategy


class MultiWorkerMirroredStrategy(SynchronousStrategy):
    """One replica per process, on any machines: shared memory inside a machine, sockets between."""

    name = "multi_worker_mirrored"

    def check(self, cluster: ClusterSpec) -> None:
        servers = len(cluster.addresses.get("ps", ()))
        if servers:
            raise UserError(
                f"multi_worker_mirrored in a cluster with {servers} ps",
                "It has no parameter servers: take them out of the cluster.",
            )
