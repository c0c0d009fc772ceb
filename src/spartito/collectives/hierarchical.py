"""Replicas on several machines: by memory inside one, by its leader between them.

Every call has three parts: the replicas of a machine join what they have; the leaders, one per
machine, do the same with each other; each leader gives its machine the result. The last part
carries an outcome: a leader that lost another machine reports it to its own, which would blame
the leader otherwise. A leader that lost one of its own tells the other leaders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from spartito.collectives.calls import CurrentCall
from spartito.collectives.collective import Collective, IdentityCollective, Piggybacked, Reducer
from spartito.collectives.membership.placement import Placement
from spartito.collectives.membership.store import error_from_text, error_to_text
from spartito.errors import MismatchedCallsError, SpartitoError, TaskLostError

T = TypeVar("T")

ENDS_GROUP = (TaskLostError, MismatchedCallsError)
PATIENCE = 10.0  # seconds beyond the limit in which a leader finds out whom it lost


class HierarchicalCollective(Collective):
    """The group of all replicas, of which those on one machine are joined first.

    ``names`` are the tasks' names in rank order, for errors. ``inside`` is the group of this
    machine, in the order of ``placement``. ``meet_leaders`` joins the group of all leaders, in
    the order of the machines; only leaders call it. Any parts of the tasks may stand for machines;
    a `reducer` is for those whose ``inside`` reduces into one memory for all.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        placement: Placement,
        inside: Collective,
        meet_leaders: Callable[[], Collective],
    ) -> None:
        super().__init__()
        self.rank = rank
        self.names = names
        self.world_size = placement.world_size
        self.inside, self.waiting = inside, inside.waiting
        self.between: Collective = IdentityCollective()
        self._placement = placement
        self.machine = placement.machine_of(rank)
        self.is_leader = rank in placement.leaders

        def meet() -> None:
            self.between = meet_leaders()
            self.between.moved = self.inside.heartbeat

        try:
            self.across(meet)
        except BaseException:
            self.close()
            raise
        self.inside.traffic = self.between.traffic = self.traffic
        self.follow(self.current_call)

    def follow(self, current_call: CurrentCall) -> None:
        self.current_call = current_call
        self.inside.follow(current_call)
        self.between.follow(current_call)

    @property
    def timeout(self) -> float:
        """Seconds that a wait for a task of one's own machine may take."""
        return self.inside.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.inside.timeout = seconds

    def heartbeat(self) -> None:
        self.inside.heartbeat()

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        self.within(lambda: self.inside.all_reduce(tensor))
        self.across(lambda: self.between.all_reduce(tensor))
        return self.within(lambda: self.inside.broadcast(tensor))

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        own = self.within(lambda: self.inside.all_gather(tensor))
        everyone = tensor.detach().new_empty((self.world_size, *tensor.shape))

        def gather() -> None:
            most = max(map(len, self._placement.machines))
            padded = everyone.new_zeros((most, *tensor.shape))
            padded[: len(own)] = torch.stack(own)
            parts = self.between.all_gather(padded)
            for part, members in zip(parts, self._placement.machines, strict=True):
                everyone[list(members)] = part[: len(members)]

        self.across(gather)
        self.within(lambda: self.inside.broadcast(everyone))
        return list(everyone)

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        origin = self._placement.machine_of(source)
        is_here = origin == self.machine
        if is_here:
            index = self._placement.members(source).index(source)
            self.within(lambda: self.inside.broadcast(tensor, index))
        self.across(lambda: self.between.broadcast(tensor, origin))
        return tensor if is_here else self.within(lambda: self.inside.broadcast(tensor))

    def _barrier(self) -> None:
        self.within(self.inside.barrier)
        self.across(self.between.barrier)

    def _reducer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Reducer:
        return HierarchicalReducer(
            self, self.within(lambda: self.inside.reducer(numel, dtype, device))
        )

    def interrupt(self) -> None:
        self.between.interrupt()
        self.inside.interrupt()

    def abort(self, error: SpartitoError) -> None:
        self.between.abort(error)

    def close(self) -> None:
        self.between.close()
        self.inside.close()

    def within(self, call: Callable[[], T]) -> T:
        """The result of ``call`` to the replicas of this machine; all leaders learn of a loss."""
        try:
            return call()
        except ENDS_GROUP as error:
            self.abort(error)
            raise

    def across(self, work: Callable[[], object], numbers: Tensor | None = None) -> None:
        """Let the leader do ``work`` with the others; then all of its machine know the outcome.

        ``numbers`` (double precision, the first is 0) come to all as they are after ``work``.
        Raises on all the error that the leader got.
        """
        outcome = torch.zeros(1, dtype=torch.float64) if numbers is None else numbers
        reason = b""
        if self.is_leader:
            try:
                work()
            except ENDS_GROUP as error:
                reason = error_to_text(error).encode()
                outcome[0] = len(reason)
                self.between.close()  # so that no other leader waits for us
        self._receive(outcome)
        if length := int(outcome[0]):
            text = torch.frombuffer(bytearray(reason or length), dtype=torch.uint8)
            self._receive(text)
            raise error_from_text(text.numpy().tobytes().decode())

    def _receive(self, outcome: Tensor) -> None:
        """Get what the leader sends, who may itself wait for another up to the limit."""
        limit = self.inside.timeout
        self.inside.timeout += 0 if self.is_leader else PATIENCE
        self.inside.waiting.enabled = (
            self.is_leader
        )  # who waits for others itself, and says for whom
        try:
            self.within(lambda: self.inside.broadcast(outcome))
        finally:
            self.inside.timeout = limit
            self.inside.waiting.enabled = True


class HierarchicalReducer:
    """The sum inside a machine, which its leader then adds up with the others where it lies."""

    def __init__(self, group: HierarchicalCollective, inside: Reducer) -> None:
        self._group = group
        self._inside = inside
        self.input, self.output = inside.input, inside.output
        self._numbers = torch.empty(0, dtype=torch.float64)
        self._add = group.between.summing()

    def reduce(self, piggybacked: Piggybacked, loss_divisor: float) -> Piggybacked:
        """As `Reducer.reduce`; what the machines weigh together scales, once."""
        # The weight 0 in front leaves the machine's sum unscaled, and becomes the outcome.
        own = self._group.within(lambda: self._inside.reduce((0.0, *piggybacked), loss_divisor))
        if len(own) != len(self._numbers):
            self._numbers = torch.empty(len(own), dtype=torch.float64)
            self._add = self._group.between.summing(self.output, self._numbers[1:])
        numbers = self._numbers.copy_(torch.tensor(own, dtype=torch.float64))

        def add() -> None:
            self._add()
            weight = numbers[1].item()
            if weight and weight != loss_divisor:
                self.output.mul_(loss_divisor / weight)

        self._group.across(add, numbers)
        return tuple(numbers[1:].tolist())
