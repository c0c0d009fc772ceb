"""What replicas say to each other: a small protocol, and the case of one who is alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spartito.collectives.waiting import Waiting
from spartito.errors import TaskLostError

Riders = tuple[float, ...]


@dataclass(slots=True)
class Traffic:
    """What this task gave to the others and got from them, in bytes, and waited, in seconds."""

    sent: int = 0
    received: int = 0
    waited: float = 0.0

    def moved(self, nbytes: int) -> None:
        """Count ``nbytes`` that went out, and as many that came in."""
        self.sent += nbytes
        self.received += nbytes


class Reducer(Protocol):
    """A standing sum of one flat tensor: fill ``input``, `reduce`, read ``output``.

    A few floats ride along with every reduction, so that a step needs one meeting only. The
    first rider is the weight of what was put in.
    """

    input: Tensor
    output: Tensor

    def reduce(self, riders: Riders, unit: float) -> Riders:
        """Sum ``input`` over the replicas into ``output``, times unit / (sum of the weights).

        Answers the sum of each rider. Where the weights sum to 0 the output is unscaled.
        """
        ...


class Collective(ABC):
    """A group of replicas that all make the same calls in the same order.

    Every call ends: with the answer, or with a `TaskLostError` that names who did not come.
    """

    rank: int
    world_size: int
    traffic: Traffic
    moved: Callable[[], None] = staticmethod(lambda: None)
    """Is called whenever something came or went in a call that takes long."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the replicas, in place, bitwise equal on all of them."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every replica's ``tensor`` (of one shape and dtype) in the order of the ranks."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Fill ``tensor`` with that of rank ``source``, in place."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every replica has come here."""

    @abstractmethod
    def reducer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Reducer:
        """A standing reduction of ``numel`` elements; all replicas ask for the same."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group. Calling it again changes nothing."""

    def reduce_all(self, *tensors: Tensor) -> None:
        """Sum several tensors of one block each, in place: as `all_reduce`, at once if possible."""
        for tensor in tensors:
            self.all_reduce(tensor)

    def summing(self, *tensors: Tensor) -> Callable[[], None]:
        """A standing `reduce_all` of these tensors, to be called as often as they are filled."""
        return lambda: self.reduce_all(*tensors)

    def give_up(self, error: TaskLostError) -> None:
        """Leave because of ``error``: who waits for us raises it too, where we can tell them."""
        self.close()

    def all_gather_rows(self, tensor: Tensor) -> list[Tensor]:
        """As `all_gather` for tensors ``(rows, ...)`` whose numbers of rows differ."""
        counts = [int(n) for n in self.all_gather(torch.tensor([tensor.shape[0]]))]
        most = max(counts)
        padded = tensor.new_zeros((most, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        return [part[:n] for part, n in zip(self.all_gather(padded), counts, strict=True)]

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Every replica's ``message`` in the order of the ranks."""
        rows = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else None
        parts = self.all_gather_rows(torch.empty(0, dtype=torch.uint8) if rows is None else rows)
        return [part.numpy().tobytes() for part in parts]


class LocalReducer:
    """The sum over one replica: its own tensor."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.input = self.output = torch.zeros(numel, dtype=dtype, device=device)

    def reduce(self, riders: Riders, unit: float) -> Riders:
        """Scale to the weight that came; nobody else is there to add."""
        if riders[0] and riders[0] != unit:
            self.output.mul_(unit / riders[0])
        return riders


class IdentityCollective(Collective):
    """One replica, alone: everything that it hears is what it says."""

    rank = 0
    world_size = 1
    timeout = 0.0  # it waits for nobody

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.waiting = Waiting(0, [""])

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.clone()]

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor

    def barrier(self) -> None:
        pass

    def reducer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Reducer:
        return LocalReducer(numel, dtype, device)

    def close(self) -> None:
        pass

    def beat(self) -> None:
        """There is nobody who waits."""


def add_riders(parts: Sequence[Riders]) -> Riders:
    """The sum of each rider over the replicas, in rank order."""
    return tuple(map(sum, zip(*parts, strict=True)))
