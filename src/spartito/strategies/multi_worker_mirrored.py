"""Equal copies on several machines."""

from __future__ import annotations

from dataclasses import dataclass

from spartito.engine.gradients.compression import Compress
from spartito.engine.gradients.streamed_gradients import BUCKET
from spartito.steps.exchanges.all_reduce import AllReduce
from spartito.steps.parts import Parts
from spartito.steps.placements.replicated import replicas
from spartito.steps.team import Team
from spartito.strategies.declaration import Strategy


@dataclass(frozen=True, kw_only=True, eq=False)
class MultiWorkerMirroredStrategy(Strategy):
    """One replica per process, on any machines: shared memory inside a machine, sockets between.

    Between machines gradients are summed while backward still runs, bitwise as without.

    Args:
        find_unused_parameters: As under `MirroredStrategy`.
        compress: How gradients go from machine to machine, whose sum leaves each once: None is as
            they are; "bf16" half of the bytes, summed in fp32; "8bit" and "4bit" numbers of fewer
            bits; "topk", "topk:0.01" the largest of them; "powersgd", "powersgd:RANK" or a
            `PowerSGD` products of thin matrices. What all but the first leave out is added to the
            next step. By process groups of torch each replica's gradients go so.
        bucket_bytes: Gradients leave in parts of at least so many bytes, as backward has them;
            three such parts are worth it, fewer leave at its end. None: in parts of 1 MB, where
            updates of this training are found to be faster so than with sums at their end.
    """

    name = "multi_worker_mirrored"
    recovers = True

    find_unused_parameters: bool | None = None
    compress: Compress = None
    bucket_bytes: int | None = None

    def parts(self, team: Team) -> Parts:
        exchange = AllReduce(
            team,
            find_unused=self.find_unused_parameters,
            compress=self.compress,
            bucket_bytes=BUCKET if self.bucket_bytes is None else self.bucket_bytes,
            tries=self.bucket_bytes is None,
        )
        return replicas(team, exchange)
