"""Equal copies on the devices of one machine."""

from __future__ import annotations

from spartito.steps.synchronous import SynchronousStep


class MirroredStep(SynchronousStep):
    """One replica per process, all on this machine: shared memory on CPUs, NCCL on GPUs."""

    name = "mirrored"
    _recovers = True
