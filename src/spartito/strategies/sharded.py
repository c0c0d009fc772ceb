"""Replicas that each keep a shard of gradients, optimizer state and parameters: ZeRO, FSDP."""

from __future__ import annotations

from dataclasses import dataclass

from spartito.steps.sharding import BLOCK
from spartito.strategies.declaration import Strategy


@dataclass(frozen=True, eq=False)
class ShardedStrategy(Strategy):
    """One model, kept in shards by the replicas that train it; each reads its own data shard.

    ZeRO (Rajbhandari et al. 2020): a replica keeps the optimizer's state of its shard (stage 1),
    the gradients' sums too (2), and of the parameters only what the module at work needs (3).
    On one machine stage 3 needs no gathering: the parameters exist once, in memory that all
    replicas read. Elsewhere a block is gathered before its module computes, forward and backward,
    and freed behind it; what else computes with its parameters has them gathered until the update.

    Parameters stay the user's own, under their names; an optimizer sees its replica's elements
    during its step. It must update each element by itself, as torch's Adam, SGD and most others
    do; the numbers are those of one device. A training that recovers keeps each shard twice more,
    in memory of the machine, or by the next task.

    Args:
        zero: 1, 2 or 3: what is kept in shards.
        copies: How many times the model is kept (HSDP): a mesh of ``copies`` rows of replicas,
            of which each has all shards; rows are consecutive replicas. It divides their number.
        block_bytes: A module with so many bytes of parameters, or more, is a block of its own.
        offload: Keep shards in the host's memory; on CPUs they are.
    """

    name = "sharded"
    implementation = "spartito.steps.sharded:ShardedStep"

    zero: int = 3
    copies: int = 1
    block_bytes: int = BLOCK
    offload: bool = False
