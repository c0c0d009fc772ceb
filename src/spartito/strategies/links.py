"""How the tasks of a pipeline are connected."""

from __future__ import annotations

from collections.abc import Mapping

from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective
from spartito.collectives.rendezvous import WORLD, Rendezvous
from spartito.pipeline.messages import Messages, connect
from spartito.strategies.groups import DATA, MODEL


class Links:
    """The groups of a task and the messages of its pipeline; it does not know its strategy.

    Args:
        stages: Of a pipeline; None: as many as there are tasks have.
        per_task: The stages of each task.
    """

    messages: Messages

    def __init__(self, stages: int | None, per_task: int) -> None:
        self._stages, self._per_task = stages, per_task

    def connect(self, rendezvous: Rendezvous, cluster: ClusterSpec) -> Mapping[str, Collective]:
        """Find this task's groups and its pipeline; all tasks call it."""
        world = cluster.world_size
        tasks = world if self._stages is None else self._stages // self._per_task
        tasks = min(tasks, world)
        slot = cluster.rank % tasks
        ranks = range(cluster.rank - slot, cluster.rank - slot + tasks)
        found = {
            WORLD: rendezvous.group(),
            DATA: rendezvous.group(DATA, range(slot, world, tasks)),
            MODEL: rendezvous.group(MODEL, ranks),
        }
        rank_of = [tasks - 1 - stage % tasks for stage in range(tasks * self._per_task)]
        self.messages = Messages(connect(rendezvous, cluster, ranks), slot, rank_of)
        return found

    def close(self) -> None:
        """Leave the pipeline, if it was connected. May be called again."""
        if hasattr(self, "messages"):
            self.messages.close()
