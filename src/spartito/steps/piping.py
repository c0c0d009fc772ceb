"""What the tasks of a pipeline tell each other beside the computation."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from spartito.collectives.collective import Traffic
from spartito.pipeline import schedules
from spartito.steps.mesh import MeshCoordination
from spartito.steps.sharing import Placed

if TYPE_CHECKING:
    from spartito.steps.pipeline import PipelineStep


class CollectedByPipeline(Placed):
    """Batches of a pipeline, whose last stage alone has seen the outputs in training."""

    def __init__(self, strategy: PipelineStep, *args: Any) -> None:
        super().__init__(*args)
        self._strategy = strategy

    def collect(self, own: bytes) -> list[bytes]:
        parts = super().collect(own)
        return self._strategy._of_last_stage(parts)


class PipelineCoordination(MeshCoordination):
    """As on every mesh; what is recorded tells how the last step went."""

    def __init__(self, strategy: PipelineStep) -> None:
        super().__init__(
            strategy._called, strategy.job, strategy.cluster, strategy._pairs, strategy.groups,
            strategy._homes, strategy._zero < 3, strategy.outer,
        )  # fmt: skip
        self._strategy = weakref.proxy(strategy)

    @property
    def traffic(self) -> Traffic:
        """Of the groups, and between the stages."""
        groups, links = super().traffic, self._strategy._links
        messages = links.messages.traffic if hasattr(links, "messages") else Traffic()
        return Traffic(
            groups.sent + messages.sent,
            groups.received + messages.received,
            groups.waited + messages.waited,
            groups.compression_error,
        )

    def describe(self) -> dict[str, Any]:
        """What a run's settings tell: of the first pipeline also what its tasks did when."""
        strategy = self._strategy
        shape, schedule = strategy._shape, strategy._schedule
        pipeline = {
            "schedule": schedule,
            "stages": shape.stages,
            "microbatches": shape.microbatches,
            "data_shards": strategy.num_replicas_in_sync,
            "bound": schedules.bubble(schedule, shape),
            "tasks": strategy._timelines,
        }
        return {**super().describe(), "pipeline": pipeline}
