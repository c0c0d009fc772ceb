"""Equal copies on the devices of one machine."""

from __future__ import annotations

from spartito.strategies.synchronous import SynchronousStrategy


class MirroredStrategy(SynchronousStrategy):
    """One replica per process, all on this machine: shared memory on CPUs, NCCL on GPUs."""

    name = "mirrored"
    _recovers = True
