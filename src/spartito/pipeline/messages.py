"""What the tasks of a pipeline send each other: activations forward, their gradients back."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Protocol, cast

import torch
from torch import Tensor

from spartito.backend.errors import LostRankError
from spartito.backend.machine import OneMachine
from spartito.backend.operations import Alone, Operations
from spartito.collectives.calls import code_of, dtype_of
from spartito.collectives.collective import Traffic
from spartito.collectives.process_group import ProcessGroupCollective
from spartito.collectives.rendezvous import Rendezvous
from spartito.collectives.rows import is_channels_last
from spartito.collectives.staged import give_back, on_host, to_host
from spartito.collectives.tcp import SocketCollective
from spartito.errors import SpartitoError
from spartito.pipeline.cut import Cut

FORTH, BACK, TIED = 0, 1, 2
"""What a message is: of the next stage, of the one before, or a gradient of tied parameters."""
_KINDS = 3
CPU = torch.device("cpu")


class Mail(Protocol):
    """What takes messages to the other tasks of a pipeline, by their rank there."""

    def send(self, tensor: Tensor, target: int, tag: int) -> object:
        """Leave ``tensor`` for rank ``target``, without waiting for it."""

    def receive(self, tensor: Tensor, source: int, tag: int) -> None:
        """Fill ``tensor`` with what rank ``source`` leaves by this tag."""

    def leave(self, error: SpartitoError) -> None:
        """Send nothing more: who waits for this task raises ``error``."""

    def close(self) -> None:
        """Leave the others. May be called again."""


class _Own:
    """Messages by memory of a machine."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self.send, self.leave, self.close = operations.send, operations.leave, operations.close

    def receive(self, tensor: Tensor, source: int, tag: int) -> None:
        self._operations.receive(tensor, source, tag).wait()


class _OfGroup:
    """Messages by a group that sends them, which the rendezvous closes."""

    def __init__(self, group: ProcessGroupCollective | SocketCollective) -> None:
        self.send, self.receive, self.leave = group.send, group.receive, group.abort

    def close(self) -> None:
        """Nothing of its own is left."""


def connect(rendezvous: Rendezvous, ranks: Sequence[int]) -> Mail:
    """Connect the tasks of a pipeline; all of them call it together.

    Args:
        rendezvous: Where the tasks of the job meet.
        ranks: Those of this pipeline, by their rank in the job.

    Returns:
        What sends and receives, by the rank among them.

    Raises:
        TaskLostError: A task does not come in time.
    """
    if len(ranks) == 1:
        return _Own(Alone())
    group, together, spins = rendezvous.members("pipeline", ranks)
    if together:
        return _Own(OneMachine(group, spins))
    made = rendezvous.group("pipeline", ranks, beside=True)
    return _OfGroup(cast("ProcessGroupCollective | SocketCollective", on_host(made)))


class Messages:
    """Tensors between the stages of one pipeline.

    Args:
        mail: Sends and receives.
        rank: This task's rank there.
        rank_of: The rank there of the task that has each stage.
        traffic: Counts what goes.
        device: Where the tensors are; they travel through the host's memory.
    """

    def __init__(
        self,
        mail: Mail,
        rank: int,
        rank_of: Sequence[int],
        traffic: Traffic,
        device: torch.device = CPU,
    ) -> None:
        self._mail, self._rank, self._rank_of = mail, rank, rank_of
        self._kept: dict[tuple[int, int], Tensor] = {}
        self.traffic, self.device = traffic, device

    def rank_of(self, stage: int) -> int:
        """The rank of the task that has a stage."""
        return self._rank_of[stage]

    def send(
        self, tensors: Sequence[Tensor], cut: Cut, stage: int, microbatch: int, kind: int
    ) -> None:
        """Leave tensors that cross from one stage to another.

        Args:
            tensors: Those of `Cut.enters`, or the gradients of those that learn.
            cut: The stages.
            stage: Where the values enter, whichever way these go.
            microbatch: What they are of.
            kind: `FORTH` or `BACK`.
        """
        target = self._rank_of[stage if kind == FORTH else stage - 1]
        if kind == FORTH and stage not in cut.formats:  # noted by both; the first ones tell
            cut.formats[stage] = [(t.dtype, is_channels_last(t)) for t in tensors]
            if target != self._rank:
                told = [[code_of(dtype), last] for dtype, last in cut.formats[stage]]
                self._leave(torch.tensor(told), target, self._tag(stage, 0, kind, 63))
        for number, tensor in enumerate(tensors):
            last = _formats(cut, stage, kind)[number][1]
            shown = tensor.detach()
            if last:
                shown = shown.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
            self._leave(shown.contiguous(), target, self._tag(stage, microbatch, kind, number))

    def receive(self, cut: Cut, stage: int, microbatch: int, kind: int) -> list[Tensor]:
        """Wait for what `send` leaves.

        Args:
            cut: The stages.
            stage: Where the values enter.
            microbatch: What they are of.
            kind: `FORTH` or `BACK`.

        Returns:
            The tensors.
        """
        source = self._rank_of[stage - 1 if kind == FORTH else stage]
        values = cut.enters(stage)
        if kind == BACK:
            values = [value for value in values if value.tensor.requires_grad]
        elif stage not in cut.formats:
            told = torch.empty(len(values), 2, dtype=torch.int64)
            self._take(told, source, self._tag(stage, 0, kind, 63))
            cut.formats[stage] = [
                (dtype_of(code) or torch.float32, bool(last)) for code, last in told.tolist()
            ]
        found = []
        for number, value in enumerate(values):
            dtype, last = _formats(cut, stage, kind)[number]
            layout = torch.channels_last if last else torch.contiguous_format
            made = torch.empty(
                value.here.shape, dtype=dtype, device=self.device, memory_format=layout
            )
            shown = made.permute(0, 2, 3, 1) if last else made
            self._take(shown, source, self._tag(stage, microbatch, kind, number))
            found.append(made)
        return found

    def add(self, tensor: Tensor, number: int, stages: Sequence[int]) -> Tensor:
        """Sum a tensor of the tasks that have some stages, the same bits on all of them.

        Args:
            tensor: Of one shape and dtype.
            number: Which sum it is, of those that are under way.
            stages: The stages, in the order in which they are added.

        Returns:
            The sum.
        """
        ranks = list(dict.fromkeys(self._rank_of[stage] for stage in stages))
        tag = number * _KINDS + TIED
        for rank in ranks:
            if rank != self._rank:
                self._leave(tensor, rank, tag)
        total: Tensor | None = None
        for rank in ranks:
            part = tensor
            if rank != self._rank:
                part = torch.empty_like(tensor)
                self._take(part, rank, tag)
            total = part.clone() if total is None else total.add_(part)
        return tensor if total is None else total

    def leave(self, name: str, what: str) -> None:
        """Tell the others why this task sends nothing more.

        Args:
            name: Of this task.
            what: Went wrong in it.
        """
        self._mail.leave(LostRankError(f"{name} ended: {what}", f"Look at {name}'s lines."))

    def _leave(self, tensor: Tensor, target: int, tag: int) -> None:
        if target == self._rank:
            self._kept[target, tag] = tensor
        else:
            self.traffic.sent += tensor.nbytes
            self._mail.send(to_host(tensor), target, tag)

    def _take(self, tensor: Tensor, source: int, tag: int) -> None:
        if source == self._rank:
            tensor.copy_(self._kept.pop((source, tag)))
        else:
            begin = perf_counter()
            own = tensor if tensor.is_cpu else torch.empty_like(tensor, device=CPU)
            self._mail.receive(own, source, tag)
            give_back(own, tensor)
            self.traffic.waited += perf_counter() - begin
            self.traffic.received += tensor.nbytes

    @staticmethod
    def _tag(stage: int, microbatch: int, kind: int, number: int) -> int:
        return ((microbatch << 12 | stage) << 6 | number) * _KINDS + kind


def _formats(cut: Cut, stage: int, kind: int) -> list[tuple[torch.dtype, bool]]:
    """The dtype of each tensor, and whether its channels are last."""
    formats = cut.formats[stage]
    if kind == FORTH:
        return formats
    both = zip(formats, cut.enters(stage), strict=True)
    return [found for found, value in both if value.tensor.requires_grad]
