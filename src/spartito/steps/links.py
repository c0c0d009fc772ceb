"""How the tasks of a pipeline are connected."""

from __future__ import annotations

from collections.abc import Mapping

from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective
from spartito.collectives.rendezvous import Rendezvous
from spartito.errors import UserError
from spartito.mesh.axes import DATA, PIPELINE, Mesh
from spartito.pipeline.messages import Messages, connect
from spartito.steps import mesh


class Links:
    """The groups of a task and the messages of its pipeline; it does not know its strategy.

    Args:
        over: The mesh, whose axis `PIPELINE` has the stages.
        batch: The axis that divides the batch.
        per_task: The stages of each task.
    """

    messages: Messages

    def __init__(self, over: Mesh, batch: str | None, per_task: int) -> None:
        self._mesh, self._batch, self._per_task = over, batch, per_task

    def connect(self, rendezvous: Rendezvous, cluster: ClusterSpec) -> Mapping[str, Collective]:
        """Find this task's groups and its pipeline; all tasks call it."""
        found = mesh.connect(self._mesh, self._batch, rendezvous, cluster)
        ranks = self._mesh.along(PIPELINE, cluster.rank)
        tasks = len(ranks)
        rank_of = [tasks - 1 - stage % tasks for stage in range(tasks * self._per_task)]
        mail = connect(rendezvous, ranks)
        self.messages = Messages(mail, ranks.index(cluster.rank), rank_of)
        return found

    def close(self) -> None:
        """Leave the pipeline, if it was connected. May be called again."""
        if hasattr(self, "messages"):
            self.messages.close()


def axes_of(given: Mapping[str, int] | None, stages: int | None, per_task: int, tasks: int) -> Mesh:
    """The mesh of a pipeline.

    Args:
        given: What the user asked for; None: pipelines of as many tasks as ``stages`` need.
        stages: Of the model; None: those of all tasks, or of the mesh.
        per_task: The stages of each task.
        tasks: Of the job.

    Raises:
        UserError: They do not go together.
    """
    if given is None:
        stages = tasks * per_task if stages is None else stages
        if stages % per_task:
            raise UserError(f"{stages} stages with {per_task} for each task", "Take a multiple.")
        length = stages // per_task
        if tasks % length:
            raise UserError(
                f"{tasks} tasks for pipelines of {length} (stages={stages}"
                + (f", {per_task} for each task)" if per_task > 1 else ")"),
                f"Take a multiple of {length} tasks, or stages={tasks * per_task}.",
            )
        return Mesh({DATA: tasks // length, PIPELINE: length})
    if PIPELINE not in given:
        raise UserError(
            f"mesh={dict(given)} has no axis {PIPELINE!r}",
            "Its size is how many tasks have stages: {'pipeline': 2, 'data': 2, 'model': 2}.",
        )
    mesh = Mesh(given)
    if stages not in (None, mesh.axes[PIPELINE] * per_task):
        raise UserError(
            f"stages={stages} on mesh={mesh.axes}, which has {mesh.axes[PIPELINE] * per_task}",
            "The mesh says it already: leave stages out.",
        )
    return mesh
