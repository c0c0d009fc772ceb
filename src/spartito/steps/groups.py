"""The named groups of tasks that a task belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective, IdentityCollective
from spartito.collectives.lane import Lane
from spartito.collectives.membership.rendezvous import WORLD, Rendezvous
from spartito.errors import TaskLostError

DATA = "data"
"""One task for each data shard: their gradients, metrics and statistics are summed."""
REPLICAS = "replicas"
"""One task for each data shard of one's own group: those whose gradients make one update. Without
groups that train apart it is `DATA`."""
MODEL = "model"
"""The tasks that compute one data shard together, each with its part of the model."""

SHARDS, COPIES = "shards", "copies"
"""The tasks that have shards of one model between them; those that have the same shard."""
ALIKE = "same shard"
"""Those of other groups that train apart, and have the same shard of a model."""
AXIS = "axis:"
"""Before the name of an axis: the group of the tasks along it."""
LAYERS = "layers"
"""The tasks that compute the same layers of one data shard: all of `MODEL` but in a pipeline."""

Connect = Callable[[Rendezvous, ClusterSpec], Mapping[str, Collective]]


def one_shard_each(rendezvous: Rendezvous, cluster: ClusterSpec) -> dict[str, Collective]:
    """Every task has a data shard of its own: the groups of all but model parallelism."""
    world = rendezvous.group()
    return {WORLD: world, DATA: world, MODEL: IdentityCollective()}


class Groups(Mapping[str, Collective]):
    """Collectives by name; the tasks meet when one of them is needed first, or at `meet`.

    ``connect`` asks ``rendezvous`` for them. A task has a rank and a size in each group:
    ``groups["data"].rank``, ``groups["data"].world_size``.
    """

    def __init__(
        self, rendezvous: Rendezvous, cluster: ClusterSpec, connect: Connect = one_shard_each
    ) -> None:
        self._rendezvous, self._cluster, self.connect = rendezvous, cluster, connect
        self._found: Mapping[str, Collective] = {}
        self._alone = dict.fromkeys((WORLD, DATA, REPLICAS, MODEL, LAYERS), IdentityCollective())
        self.is_closed = False

    @classmethod
    def alone(cls) -> Groups:
        """A task that is alone in every group."""
        own = ClusterSpec.alone()
        return cls(Rendezvous(own, torch.device("cpu")), own)

    @property
    def world(self) -> Collective:
        """All tasks."""
        return self[WORLD]

    @property
    def data(self) -> Collective:
        """One task for each data shard."""
        return self[DATA]

    @property
    def replicas(self) -> Collective:
        """Those of `data` whose gradients make one update."""
        return self[REPLICAS]

    @property
    def model(self) -> Collective:
        """The tasks that share this one's data shard."""
        return self[MODEL]

    def meet(self) -> Mapping[str, Collective]:
        """Connect the groups, unless they are; who joins later is alone until `regroup`."""
        if not self._found:
            if self.joins:
                return self._alone
            self._found = self.connect(self._rendezvous, self._cluster)
        return self._found

    @property
    def joins(self) -> bool:
        """Whether the others train already: this task meets them in `regroup`, and not before."""
        return self._rendezvous.joins

    @property
    def generation(self) -> int:
        """How often the tasks have met anew."""
        return self._rendezvous.generation

    @property
    def somebody_waits(self) -> bool:
        """Whether a task waits for the others to `regroup`, as far as this one knows."""
        return self._rendezvous.somebody_waits()

    def look_for_leavers(self) -> None:
        """Look from now on whether others `regroup`, for who seldom meets them."""
        self._rendezvous.look_for_leavers()

    @property
    def others_leave(self) -> bool:
        """Whether others were seen to `regroup`."""
        return self._rendezvous.others_leave

    def training_begins(self) -> None:
        """From now on a process that comes as one of the tasks replaces it."""
        self._rendezvous.training_begins()

    def regroup(self, cause: TaskLostError | None) -> ClusterSpec:
        """Leave all groups, and find out who is there; who lives calls it, and who is new.

        Args:
            cause: The loss; None where nobody was lost.

        Returns:
            The tasks that go on. Their groups connect when one is needed.

        Raises:
            TaskLostError: Too few are left, or this one is no longer counted among them.
        """
        self._leave_lane()
        self._found = {}
        self._cluster = self._rendezvous.regroup(cause)
        return self._cluster

    @cached_property
    def lane(self) -> Lane:
        """The tasks of `replicas` once more, for sums beside the computation; all ask at once.

        For tasks that sockets join.
        """
        return Lane(self._rendezvous.group("gradients", self.replicas.ranks))

    def close(self) -> None:
        """Leave all groups; who never met has nothing to leave."""
        self.is_closed = True
        self._leave_lane()
        self._rendezvous.close()

    def _leave_lane(self) -> None:
        if (lane := self.__dict__.pop("lane", None)) is not None:
            lane.close()

    def __getitem__(self, name: str) -> Collective:
        return self.meet()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.meet())

    def __len__(self) -> int:
        return len(self.meet())


BUNDLE = 4 << 20
"""Bytes of small tensors that travel as one message."""


def send(group: Collective, tensors: Sequence[Tensor], source: int = 0) -> None:
    """The values of one of a group's tasks to all, into the same tensors; none is on meta.

    Args:
        group: The tasks; all call it.
        tensors: Of equal shapes on all of them.
        source: The rank whose values they get.
    """
    if group.world_size == 1:
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor.detach() for tensor in tensors if tensor.dtype == dtype]
        while alike:
            ends = accumulate(tensor.nbytes for tensor in alike)
            count = max(1, sum(end <= BUNDLE for end in ends))
            bundle, alike = alike[:count], alike[count:]
            flat = group.broadcast(torch.cat([tensor.reshape(-1) for tensor in bundle]), source)
            for tensor, part in zip(bundle, flat.split([t.numel() for t in bundle]), strict=True):
                tensor.copy_(part.view(tensor.shape))
