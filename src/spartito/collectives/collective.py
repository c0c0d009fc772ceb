"""Collective communication: what every kind of group can do, and the group of one task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Protocol

import torch
from torch import Tensor

from spartito.collectives.calls import CurrentCall, code_of, dtype_of, encode, mismatch
from spartito.errors import SpartitoError, UserError
from spartito.waiting import Waiting

Number = float | Tensor
"""A number that the host knows, or a 0-d tensor on the device that nobody waits for."""
Piggybacked = tuple[float, ...]
MAX_PIGGYBACKED = 24
"""How many may ride along."""
MAX_DIMS = 64  # of torch's own
HALF = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Traffic:
    """Bytes that this task sent and received, and seconds that it waited.

    ``compression_error`` is what compressed sums left out, relative to them (L2 norm).
    """

    sent: int = 0
    received: int = 0
    waited: float = 0.0
    compression_error: float = 0.0

    def moved(self, nbytes: int) -> None:
        """Count ``nbytes`` that went out, and as many that came in."""
        self.sent += nbytes
        self.received += nbytes


def _nothing() -> None:
    """Nobody wants to know."""


class Reducer(Protocol):
    """A standing sum of one flat tensor: fill ``input``, `reduce`, read ``output``.

    A few floats ride along with every reduction, so that a step needs one meeting only. The
    first piggybacked scalar is the weight of what was put in.
    """

    input: Tensor
    output: Tensor

    def reduce(self, piggybacked: Piggybacked, loss_divisor: float) -> Piggybacked:
        """Sum ``input`` over the replicas into ``output``, times loss divisor / sum of the weights.

        Returns the sum of each piggybacked scalar. Where the weights sum to 0 the output is
        unscaled.
        """
        ...


class Collective(ABC):
    """A group of replicas that all make the same calls in the same order.

    Every call ends: with its result, or with a `TaskLostError` that names who did not come, or
    with a `MismatchedCallsError` on all that are in calls which differ in operation, number of
    elements, dtype or purpose. For that a subclass sends ``current_call.tag`` along with each
    exchange, and gives what the others sent to `_compare`.
    """

    rank: int
    world_size: int
    names: Sequence[str] = ()
    """The tasks in rank order, for errors."""
    name: str = "world"
    """What the strategy calls this group."""
    ranks: tuple[int, ...] = (0,)
    """The ranks of its tasks in the job."""
    traffic: Traffic
    timeout: float
    """Seconds that a wait for another task may take, unless that moves."""
    waiting: Waiting
    """Says for whom this task waits."""
    is_leader: bool = True
    """Whether this task sends what its machine has summed."""
    moved: Callable[[], None] = staticmethod(_nothing)
    """Is called whenever something came or went in a call that takes long."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.current_call = CurrentCall()
        self._reducers = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the group, bitwise equal on all of its tasks.

        Args:
            tensor: Changed in place; of one shape and dtype on all tasks.

        Returns:
            The same tensor.
        """
        with self.current_call.call(encode("all_reduce", tensor.numel(), tensor.dtype)):
            return self._all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Collect a tensor of every task.

        Args:
            tensor: Of one shape and dtype on all tasks.

        Returns:
            The tensors in the order of the ranks.
        """
        with self.current_call.call(encode("all_gather", tensor.numel(), tensor.dtype)):
            return self._all_gather(tensor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Copy a tensor of one task to all.

        Args:
            tensor: Changed in place; of one shape and dtype on all tasks.
            source: The rank in this group whose values all get.

        Returns:
            The same tensor.
        """
        with self.current_call.call(encode("broadcast", tensor.numel(), tensor.dtype, source)):
            return self._broadcast(tensor, source)

    def all_gather_into(self, output: Tensor, tensor: Tensor) -> None:
        """As `all_gather`, into one block.

        Args:
            output: ``(world_size, numel)``; its rows become the tensors, in the order of the ranks.
            tensor: Flat; it may be its row of ``output``.
        """
        with self.current_call.call(encode("all_gather", tensor.numel(), tensor.dtype)):
            self._all_gather_into(output, tensor)

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """Sum rows over the group: each task gets the sum of its own.

        Args:
            rows: ``(world_size, numel)``, a block of memory; what is in it afterwards is open.

        Returns:
            The sum of row ``rank``, added up in the order of the ranks.
        """
        with self.current_call.call(encode("reduce_scatter", rows.numel(), rows.dtype)):
            return self._reduce_scatter(rows)

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Give each task its row.

        Args:
            rows: ``(world_size, ...)``: a row for each rank.

        Returns:
            As many rows: what each rank has for this one.
        """
        with self.current_call.call(encode("all_to_all", rows.numel(), rows.dtype)):
            return self._all_to_all(rows)

    def barrier(self) -> None:
        """Return when every task of the group is here."""
        with self.current_call.call(encode("barrier", 0, None)):
            self._barrier()

    def reducer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Reducer:
        """Make a reduction that is repeated, as that of the gradients in every step.

        Args:
            numel: Elements of the flat tensor; the same on all tasks.
            dtype: Of the tensor.
            device: Where it is.

        Returns:
            The reducer with its memory.
        """
        with self.current_call.call(encode("new reducer", numel, dtype)):
            made = self._reducer(numel, dtype, device)
        return _Announced(made, self.current_call, self.tag_of_sum(numel, dtype))

    def tag_of_sum(self, numel: int, dtype: torch.dtype | None) -> int:
        """The tag of one more sum that is repeated; all tasks ask for it in the same order."""
        self._reducers += 1
        return encode("reduce", numel, dtype, self._reducers - 1)

    @abstractmethod
    def _all_reduce(self, tensor: Tensor) -> Tensor: ...

    @abstractmethod
    def _all_gather(self, tensor: Tensor) -> list[Tensor]: ...

    @abstractmethod
    def _broadcast(self, tensor: Tensor, source: int) -> Tensor: ...

    def _all_gather_into(self, output: Tensor, tensor: Tensor) -> None:
        for row, part in zip(output, self._all_gather(tensor), strict=True):
            row.copy_(part)

    def _reduce_scatter(self, rows: Tensor) -> Tensor:
        return self._all_reduce(rows)[self.rank]

    def _all_to_all(self, rows: Tensor) -> Tensor:
        return torch.stack([part[self.rank] for part in self._all_gather(rows)])

    @abstractmethod
    def _barrier(self) -> None: ...

    @abstractmethod
    def _reducer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Reducer: ...

    def follow(self, current_call: CurrentCall) -> None:
        """Be at the calls of another group of this task: their purpose is the same."""
        self.current_call = current_call

    @abstractmethod
    def close(self) -> None:
        """Leave the group; may be called again."""

    def heartbeat(self) -> None:  # noqa: B027 - few can
        """Show those who wait for this task that it makes progress: their limit begins anew."""

    def _compare(self, peer: int, tag: int, own: int | None = None) -> None:
        """Raise if rank ``peer`` is in the call ``tag``, and we are at another: ``own``."""
        own = self.current_call.tag if own is None else own
        if tag != own:
            calls = {self.rank: own, peer: tag}
            error = mismatch({self.names[rank]: calls[rank] for rank in sorted(calls)})
            self.abort(error)
            raise error

    def reduce_all(self, *tensors: Tensor) -> None:
        """Sum several tensors of one block each, in place: as `all_reduce`, at once if possible."""
        for tensor in tensors:
            self.all_reduce(tensor)

    def summing(self, *tensors: Tensor) -> Callable[[], None]:
        """Make a `reduce_all` that is repeated.

        Args:
            tensors: Of one block of memory each; filled anew before each call.

        Returns:
            What sums them over the group, in place.
        """
        return lambda: self.reduce_all(*tensors)

    def gathering(self, tensor: Tensor) -> Callable[[], list[Tensor]]:
        """Make an `all_gather` that is repeated.

        Args:
            tensor: One block of memory; filled anew before each call.

        Returns:
            What collects it from every task, in the order of the ranks.
        """
        return lambda: self.all_gather(tensor)

    def interrupt(self) -> None:
        """End a call that another thread of this process is in: it raises, and so do the others."""
        self.close()

    def abort(self, error: SpartitoError) -> None:
        """Leave the group because of an error.

        Args:
            error: What the tasks that wait for us raise too, where it can be sent to them.
        """
        self.close()

    def all_gather_rows(self, tensor: Tensor) -> list[Tensor]:
        """As `all_gather` for tensors whose numbers of rows differ.

        Args:
            tensor: Shape ``(rows, ...)``. A task without rows takes the rest of the shape and the
                dtype from the others.

        Returns:
            The tensors in the order of the ranks.

        Raises:
            UserError: On all tasks, where the rest of the shape or the dtype differs.
        """
        with self.current_call.call(encode("gather of rows", 0, None)):
            kinds = [_Rows.read(kind) for kind in self.all_gather(_Rows.of(tensor).written())]
            kind = next((kind for kind in kinds if kind.count), kinds[0])
            if not all(kind.fits(other) for other in kinds):
                raise UserError(
                    f"rows of different kinds cannot be gathered: {self._listed(kinds)}",
                    "A collate_fn works on one data shard of a batch: pad to one length for "
                    "all, or give outputs of one shape and dtype.",
                )
            most = max(other.count for other in kinds)
            padded = tensor.new_zeros((most, *kind.shape), dtype=kind.dtype or tensor.dtype)
            if tensor.shape[0]:
                padded[: tensor.shape[0]] = tensor
            parts = self.all_gather(padded)
            return [part[: other.count] for part, other in zip(parts, kinds, strict=True)]

    def _listed(self, kinds: Sequence[_Rows]) -> str:
        return ", ".join(f"{kind} on {name}" for kind, name in zip(kinds, self.names, strict=True))

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Collect a message of every task.

        Args:
            message: Of any length.

        Returns:
            The messages in the order of the ranks.
        """
        rows = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else None
        with self.current_call.call(encode("gather of bytes", 0, None)):
            parts = self.all_gather_rows(
                torch.empty(0, dtype=torch.uint8) if rows is None else rows
            )
        return [part.numpy().tobytes() for part in parts]


@dataclass(frozen=True, slots=True)
class _Rows:
    """How many rows a tensor has (-1: it is a scalar), and what each of them is."""

    count: int
    shape: tuple[int, ...]
    code: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Rows:
        count, *shape = tensor.shape or (-1,)
        return cls(count, tuple(shape), code_of(tensor.dtype))

    @classmethod
    def read(cls, numbers: Tensor) -> _Rows:
        count, code, dims, *shape = numbers.tolist()
        return cls(count, tuple(shape[:dims]), code)

    def written(self) -> Tensor:
        """The same in as many numbers whatever it is."""
        numbers = [self.count, self.code, len(self.shape), *self.shape]
        return torch.tensor(numbers + [0] * (3 + MAX_DIMS - len(numbers)))

    @property
    def dtype(self) -> torch.dtype | None:
        """That of the tensor; None for one of the rare ones."""
        return dtype_of(self.code)

    def fits(self, other: _Rows) -> bool:
        """Whether ``other`` can stand under these."""
        alike = (self.shape, self.code) == (other.shape, other.code)
        return other.count == 0 or (other.count > 0 and alike)

    def __str__(self) -> str:
        dtype = str(self.dtype or "other").removeprefix("torch.")
        return f"{(self.count, *self.shape)} {dtype}" if self.count >= 0 else f"a {dtype} scalar"


class _Announced:
    """A reducer that tells which call it is."""

    def __init__(self, reducer: Reducer, current_call: CurrentCall, tag: int) -> None:
        self.input, self.output = reducer.input, reducer.output
        self._reducer, self._current_call, self._tag = reducer, current_call, tag

    def reduce(self, piggybacked: Piggybacked, loss_divisor: float) -> Piggybacked:
        current = self._current_call  # `CurrentCall.call` without an object: this is in every step
        before = current.tag
        current.tag = before or current.purpose << 58 | self._tag
        try:
            return self._reducer.reduce(piggybacked, loss_divisor)
        finally:
            current.tag = before


class LocalReducer:
    """The sum over one replica: its own tensor."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.input = self.output = torch.zeros(numel, dtype=dtype, device=device)

    def reduce(self, piggybacked: Piggybacked, loss_divisor: float) -> Piggybacked:
        """Scale to the weight that came; nobody else is there to add."""
        if piggybacked[0] and piggybacked[0] != loss_divisor:
            self.output.mul_(loss_divisor / piggybacked[0])
        return piggybacked


class IdentityCollective(Collective):
    """A group of one task."""

    rank = 0
    world_size = 1
    timeout = 0.0  # it waits for nobody
    names = ("this task",)

    def __init__(self) -> None:
        super().__init__()
        self.waiting = Waiting(0, [""])

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.clone()]

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return tensor

    def _barrier(self) -> None:
        pass

    def _reducer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Reducer:
        return LocalReducer(numel, dtype, device)

    def close(self) -> None:
        pass


def added(rows: Tensor) -> Tensor:
    """The sum of all rows in their order, in memory of the first; 16-bit numbers round once."""
    first, *others = rows.unbind()
    if first.dtype in HALF and len(others) > 1:
        first.copy_(rows.float().sum(0))
        return first
    for row in others:
        first.add_(row)
    return first


def add_piggybacked(parts: Sequence[Piggybacked]) -> Piggybacked:
    """The sum of each piggybacked scalar over the replicas, in rank order."""
    return tuple(map(sum, zip(*parts, strict=True)))


def scale_of(weight: float, loss_divisor: float) -> float:
    """What makes gradients that were divided by ``loss_divisor`` the mean over their weight.

    Args:
        weight: Of all replicas; NaN where only devices know that of one.
        loss_divisor: What their backward passes divided by.

    Returns:
        The factor; 1.0 where nothing came, or where it is the device's.
    """
    return loss_divisor / weight if weight and not isnan(weight) else 1.0


def left() -> UserError:
    """The error of a call of tasks that have left each other."""
    return UserError(
        "this task has left the others, whom it needs for that: strategy.close() was called, or an "
        "error ended what they did together",
        "Compute, save and ask for state_dict() before that, on all tasks.",
    )
