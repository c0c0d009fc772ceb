"""One replica: the case that all others are compared with."""

from __future__ import annotations

from spartito.cluster.spec import ClusterSpec
from spartito.errors import UserError
from spartito.strategies.synchronous import SynchronousStrategy


class OneDeviceStrategy(SynchronousStrategy):
    """Everything on one device of one process."""

    name = "one_device"

    def check(self, cluster: ClusterSpec) -> None:
        if cluster.num_replicas > 1:
            raise UserError(
                f"one_device in a cluster of {cluster.num_replicas} processes that train",
                "Choose mirrored (one machine) or multi_worker_mirrored (several).",
            )
