"""Replicas that each keep a shard of gradients, optimizer state and parameters: ZeRO, FSDP."""

from __future__ import annotations

from dataclasses import dataclass

from spartito.engine.gradients.compression import Compress
from spartito.errors import UserError
from spartito.names import divisors
from spartito.steps.exchanges.sharded import BLOCK, InShards, Sharded
from spartito.steps.parts import Parts
from spartito.steps.placements.replicated import Replicated
from spartito.steps.recovery import EndsWithLoss, Recovering, Regrouping
from spartito.steps.team import Team
from spartito.steps.topology import Rows
from spartito.strategies.declaration import Strategy


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedStrategy(Strategy):
    """One model, kept in shards by the replicas that train it; each reads its own data shard.

    ZeRO (Rajbhandari et al. 2020): a replica keeps the optimizer's state of its shard (stage 1),
    the gradients' sums too (2), and of the parameters only what the module at work needs (3).
    On one machine stage 3 needs no gathering: the parameters exist once, in memory that all
    replicas read. Elsewhere a block is gathered before its module computes, forward and backward,
    and freed behind it; what else computes with its parameters has them gathered until the update.
    Between accelerators, and with ``communication="fsdp"``, torch's FSDP2 does that beside the
    computation, for models that it can have.

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
        compress: As under `MultiWorkerMirroredStrategy`. Then each replica sums whole blocks, and
            takes its shards of them: memory for all gradients, and bytes as for equal copies.
    """

    name = "sharded"
    recovers = by_fsdp = True

    zero: int = 3
    copies: int = 1
    block_bytes: int = BLOCK
    offload: bool = False
    compress: Compress = None

    def parts(self, team: Team) -> Parts:
        self._check(team)
        exchange = Sharded(
            team,
            self.zero,
            self.block_bytes,
            lambda: team.tasks.world_size // self.copies,
            compress=self.compress,
        )
        placement = Replicated(team, exchange)
        recovery: Recovering = EndsWithLoss()
        if team.recovery is not None:
            copies = InShards(team, exchange)
            recovery = Regrouping(team, copies, placement.gradients, exchange)
        return Parts(Rows(self.copies), placement, exchange, recovery)

    def _check(self, team: Team) -> None:
        if team.communication == "ddp":
            raise UserError("sharded with communication='ddp'", "Choose 'fsdp', or mirrored.")
        if team.communication == "fsdp" and (self.zero < 3 or self.compress is not None):
            given = f"zero={self.zero}" if self.zero < 3 else f"compress={self.compress!r}"
            raise UserError(
                f"communication='fsdp' with {given}: FSDP2 has all in shards, and sends it whole",
                "Choose 'process_group', or leave one of them out.",
            )
        if self.offload:
            raise UserError(
                "offload=True on CPUs, whose memory is the host's already", "Leave it out."
            )
        world = team.tasks.world_size
        if self.copies < 1 or world % self.copies:
            raise UserError(
                f"copies={self.copies} of the model on {world} replicas",
                f"It divides their number: one of {divisors(world)}.",
            )
        if self.copies > 1 and team.recovery is not None:
            raise UserError(
                f"copies={self.copies} with recovery, which keeps copies of its own",
                "Leave one of them out.",
            )
