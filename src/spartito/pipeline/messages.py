"""What the tasks of a pipeline send each other: activations forward, their gradients back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Protocol, cast

import torch
from torch import Tensor

from spartito.backend.errors import LostRankError
from spartito.backend.machine import OneMachine
from spartito.backend.operations import Alone, Operations
from spartito.collectives.calls import code_of, dtype_of
from spartito.collectives.collective import Traffic
from spartito.collectives.membership.rendezvous import Rendezvous
from spartito.collectives.process_group import ProcessGroupCollective, works_there
from spartito.collectives.rows import is_channels_last
from spartito.collectives.sockets.tcp import SocketCollective
from spartito.collectives.staged import give_back, on_host, to_host
from spartito.errors import SpartitoError, TaskLostError
from spartito.pipeline.cut import Cut
from spartito.pipeline.device_links import DeviceLinks
from spartito.pipeline.program import Value

FORTH, BACK, TIED = 0, 1, 2
"""What a message is: of the next stage, of the one before, or a gradient of tied parameters."""
_KINDS = 3
_NEVER = TIED + (_KINDS << 20)
"""The tag of no message: it is awaited of a task that is known to send nothing more."""
CPU = torch.device("cpu")


Wait = Callable[[], None]
"""Returns when a tensor is there."""


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


def connect_devices(
    rendezvous: Rendezvous, ranks: Sequence[int], rank_of: Sequence[int], own: int
) -> DeviceLinks | None:
    """Connect the devices of a pipeline's tasks, where a process group moves what is on them.

    Args:
        rendezvous: Where the tasks of the job meet.
        ranks: Those of this pipeline, by their rank in the job.
        rank_of: The rank among them of the task that has each stage.
        own: This task's rank among them.

    Returns:
        None where tensors travel through the host's memory.
    """
    if len(ranks) == 1 or works_there(rendezvous.group()) is None:
        return None
    return DeviceLinks(rendezvous, ranks, rank_of, own, (FORTH, BACK))


class Messages:
    """Tensors between the stages of one pipeline.

    Args:
        mail: Sends and receives.
        rank: This task's rank there.
        rank_of: The rank there of the task that has each stage.
        traffic: Counts what goes.
        device: Where the tensors are.
        links: Keep them there; None: they travel through the host's memory.
    """

    def __init__(
        self,
        mail: Mail,
        rank: int,
        rank_of: Sequence[int],
        traffic: Traffic,
        device: torch.device = CPU,
        links: DeviceLinks | None = None,
    ) -> None:
        self._mail, self._rank, self._rank_of = mail, rank, rank_of
        self._links = links
        self._asked: dict[tuple[int, int, int], tuple[list[Tensor], list[Wait]]] = {}
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
            shown, tag = shown.contiguous(), self._tag(stage, microbatch, kind, number)
            if self._links is None or target == self._rank:
                self._leave(shown, target, tag)
            else:
                self.traffic.sent += shown.nbytes
                with self._hearing(target):
                    self._links.send(shown.to(self.device), stage, kind, tag)

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
        values = _values(cut, stage, kind)
        if kind == FORTH and stage not in cut.formats:
            told = torch.empty(len(values), 2, dtype=torch.int64)
            self._take(told, source, self._tag(stage, 0, kind, 63))
            cut.formats[stage] = [
                (dtype_of(code) or torch.float32, bool(last)) for code, last in told.tolist()
            ]
        if self._links is not None and source != self._rank:
            return self._here(cut, stage, microbatch, kind)
        found = []
        for number in range(len(values)):
            made, shown = self._block(cut, stage, kind, number)
            self._take(shown, source, self._tag(stage, microbatch, kind, number))
            found.append(made)
        return found

    def ask(self, cut: Cut, stage: int, microbatch: int, kind: int) -> None:
        """Have come, beside what is computed now, what `receive` is called for next.

        Messages of one stage and kind are asked for in the order of microbatches. Where nothing
        goes beside the computation, or it is not known yet what will come, nothing is done.
        """
        source = self._rank_of[stage - 1 if kind == FORTH else stage]
        if self._links is None or source == self._rank or stage not in cut.formats:
            return
        waits, found = list[Wait](), list[Tensor]()
        for number in range(len(_formats(cut, stage, kind))):
            made, shown = self._block(cut, stage, kind, number)
            tag = self._tag(stage, microbatch, kind, number)
            with self._hearing(source):
                waits.append(self._links.receiving(shown, stage, kind, tag))
            found.append(made)
        self._asked[stage, microbatch, kind] = found, waits

    @contextmanager
    def _hearing(self, other: int) -> Iterator[None]:
        """A block in which another task may turn out to be lost: by the mail all hear why."""
        try:
            yield
        except TaskLostError:
            self._mail.receive(torch.empty(1), other, _NEVER)
            raise

    def _here(self, cut: Cut, stage: int, microbatch: int, kind: int) -> list[Tensor]:
        """What was asked for, now or before."""
        if (stage, microbatch, kind) not in self._asked:
            self.ask(cut, stage, microbatch, kind)
        found, waits = self._asked.pop((stage, microbatch, kind))
        begin = perf_counter()
        with self._hearing(self._rank_of[stage - 1 if kind == FORTH else stage]):
            for wait in waits:
                wait()
        self.traffic.waited += perf_counter() - begin
        self.traffic.received += sum(tensor.nbytes for tensor in found)
        return found

    def _block(self, cut: Cut, stage: int, kind: int, number: int) -> tuple[Tensor, Tensor]:
        """A tensor for what comes, and the same as one block."""
        dtype, last = _formats(cut, stage, kind)[number]
        layout = torch.channels_last if last else torch.contiguous_format
        made = torch.empty(
            _values(cut, stage, kind)[number].here.shape,
            dtype=dtype, device=self.device, memory_format=layout,
        )  # fmt: skip
        return made, made.permute(0, 2, 3, 1) if last else made

    def add(self, tensors: Sequence[Tensor], number: int, stages: Sequence[int]) -> list[Tensor]:
        """Sum tensors of the tasks that have some stages, the same bits on all of them.

        Args:
            tensors: Each of one shape and dtype on all tasks.
            number: Which sums these are, of those that are under way.
            stages: The stages, in the order in which they are added.

        Returns:
            The sums.
        """
        ranks = list(dict.fromkeys(self._rank_of[stage] for stage in stages))
        others = [rank for rank in ranks if rank != self._rank]
        by_mail = [n for n, t in enumerate(tensors) if self._links is None or t.is_cpu]
        tags = [(number * len(tensors) + n) * _KINDS + TIED for n in range(len(tensors))]
        for n in by_mail:  # all of them leave before one is awaited
            for rank in others:
                self._leave(tensors[n], rank, tags[n])
        totals = []
        for n, tensor in enumerate(tensors):
            if self._links is not None and n not in by_mail and others:
                self.traffic.moved(tensor.nbytes * len(others))
                with self._hearing(others[0]):
                    parts = self._links.gather(tensor, ranks)
            else:
                came = {rank: torch.empty_like(tensor) for rank in others}
                for rank, part in came.items():
                    self._take(part, rank, tags[n])
                parts = [came.get(rank, tensor) for rank in ranks]
            total = parts[0].clone()
            for part in parts[1:]:
                total.add_(part)
            totals.append(total)
        return totals

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


def _values(cut: Cut, stage: int, kind: int) -> list[Value]:
    """What enters a stage; of gradients there are those of what learns."""
    values = cut.enters(stage)
    return values if kind == FORTH else [v for v in values if v.tensor.requires_grad]
