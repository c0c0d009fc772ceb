"""Equal copies on the devices of one machine."""

from __future__ import annotations

from dataclasses import dataclass

from spartito.strategies.declaration import Strategy


@dataclass(frozen=True, eq=False)
class MirroredStrategy(Strategy):
    """One replica per process, all on this machine: shared memory on CPUs, NCCL on GPUs.

    Args:
        find_unused_parameters: With "ddp": True searches in every step for parameters that get no
            gradient, False refuses them, None does what the first update needs.
    """

    name = "mirrored"
    implementation = "spartito.steps.mirrored:MirroredStep"

    find_unused_parameters: bool | None = None
