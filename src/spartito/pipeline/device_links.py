"""Messages of a pipeline that stay on devices, where a process group moves tensors there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from spartito.collectives.membership.rendezvous import Rendezvous
from spartito.collectives.process_group import ProcessGroupCollective, works_there


class DeviceLinks:
    """A group of two tasks for each boundary of stages, and for each way over it.

    A backend such as NCCL knows no tags, and does what it is asked for one after the other. So a
    link has messages of one kind, which leave and are taken in the order of microbatches under
    every schedule; and none of them waits for one that goes the other way.

    Args:
        rendezvous: Where the tasks of the job meet.
        ranks: The tasks of the pipeline, by their rank in the job.
        rank_of: The rank among them of the task that has each stage.
        own: This task's rank among them.
        kinds: What a link may be for: of the stage before, or of the next one.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        ranks: Sequence[int],
        rank_of: Sequence[int],
        own: int,
        kinds: Sequence[int],
    ) -> None:
        self._rendezvous, self._ranks, self._own = rendezvous, ranks, own
        self._links: dict[tuple[int, int], tuple[ProcessGroupCollective, int]] = {}
        for stage in range(1, len(rank_of)):
            ends = rank_of[stage - 1], rank_of[stage]
            if own not in ends or ends[0] == ends[1]:
                continue
            for kind in kinds:
                group = self._group(f"pipeline {stage} {kind}", ends)
                self._links[stage, kind] = group, 1 - group.rank

    def send(self, tensor: Tensor, stage: int, kind: int, tag: int) -> None:
        """Leave a copy of a tensor of the device, without waiting for it."""
        group, target = self._links[stage, kind]
        group.send(tensor, target, tag)

    def receiving(self, tensor: Tensor, stage: int, kind: int, tag: int) -> Callable[[], None]:
        """Fill a tensor of the device with what comes next by this link; returns what awaits it."""
        group, source = self._links[stage, kind]
        return group.receiving(tensor, source, tag)

    def gather(self, tensor: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        """The tensors of some tasks of the pipeline, which all of them call together."""
        order = sorted(ranks, key=lambda rank: self._ranks[rank])
        group = self._group(f"pipeline, tied {order}", order)
        parts = group.all_gather(tensor)
        return [parts[order.index(rank)] for rank in ranks]

    def _group(self, name: str, ranks: Sequence[int]) -> ProcessGroupCollective:
        made = works_there(self._rendezvous.group(name, [self._ranks[rank] for rank in ranks]))
        assert made is not None, "as the group of all tasks does"
        return made
