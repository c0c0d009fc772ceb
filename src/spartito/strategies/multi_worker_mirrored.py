"""Equal copies on several machines."""

from __future__ import annotations

from spartito.strategies.synchronous import SynchronousStrategy


class MultiWorkerMirroredStrategy(SynchronousStrategy):
    """One replica per process, on any machines: shared memory inside a machine, sockets between."""

    name = "multi_worker_mirrored"
