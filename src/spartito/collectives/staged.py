"""A group for tensors of any device, over one that moves the host's memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spartito.collectives.calls import CurrentCall
from spartito.collectives.collective import Collective, Piggybacked, Reducer
from spartito.errors import SpartitoError


class StagedCollective(Collective):
    """Brings tensors of a device through the host's memory; those of the host go as they are.

    It is what replicas use that share a device, whose devices torch has no process group for, or
    whose training outlives the loss of a task.

    Args:
        host: A group of the same tasks, which moves the host's memory.
    """

    def __init__(self, host: Collective) -> None:
        self.host = host
        self.rank, self.world_size, self.names = host.rank, host.world_size, host.names
        self.traffic, self.current_call = host.traffic, host.current_call
        self.waiting, self.is_leader = host.waiting, host.is_leader

    @property
    def timeout(self) -> float:
        """Seconds that a wait for another task may take."""
        return self.host.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.host.timeout = seconds

    def follow(self, current_call: CurrentCall) -> None:
        self.host.follow(current_call)
        self.current_call = current_call

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._in_place(tensor, self.host.all_reduce)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        parts = self.host.all_gather(to_host(tensor))
        return [part.to(tensor.device) for part in parts]

    def all_gather_into(self, output: Tensor, tensor: Tensor) -> None:
        if output.device.type == "cpu":
            self.host.all_gather_into(output, tensor)
            return
        own = to_host(tensor)
        whole = own.new_empty(output.shape)
        self.host.all_gather_into(whole, own)
        output.copy_(whole)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return self._in_place(tensor, lambda own: self.host.broadcast(own, source))

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        return self.host.reduce_scatter(to_host(rows)).to(rows.device)

    def all_to_all(self, rows: Tensor) -> Tensor:
        return self.host.all_to_all(to_host(rows)).to(rows.device)

    def barrier(self) -> None:
        self.host.barrier()

    def reducer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Reducer:
        made = self.host.reducer(numel, dtype, torch.device("cpu"))
        return made if device.type == "cpu" else _StagedReducer(made, device)

    def tag_of_sum(self, numel: int, dtype: torch.dtype | None) -> int:
        return self.host.tag_of_sum(numel, dtype)

    def reduce_all(self, *tensors: Tensor) -> None:
        own = [to_host(tensor) for tensor in tensors]
        self.host.reduce_all(*own)
        for tensor, total in zip(tensors, own, strict=True):
            give_back(total, tensor)

    def summing(self, *tensors: Tensor) -> Callable[[], None]:
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return self.host.summing(*tensors)
        own = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        add = self.host.summing(*own)

        def run() -> None:
            for tensor, copy in zip(tensors, own, strict=True):
                copy.copy_(tensor)
            add()
            for tensor, copy in zip(tensors, own, strict=True):
                tensor.copy_(copy)

        return run

    def heartbeat(self) -> None:
        self.host.heartbeat()

    def interrupt(self) -> None:
        self.host.interrupt()

    def abort(self, error: SpartitoError) -> None:
        self.host.abort(error)

    def close(self) -> None:
        self.host.close()

    def _in_place(self, tensor: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
        own = to_host(tensor)
        call(own)
        give_back(own, tensor)
        return tensor

    # What the group of the host does itself

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        return self.all_reduce(tensor)

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self.all_gather(tensor)

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return self.broadcast(tensor, source)

    def _barrier(self) -> None:
        self.barrier()

    def _reducer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Reducer:
        return self.reducer(numel, dtype, device)


class _StagedReducer:
    """A sum of a flat tensor of a device, by one of the host's memory."""

    def __init__(self, host: Reducer, device: torch.device) -> None:
        self._host = host
        self.input = self.output = torch.zeros_like(host.input, device=device)

    def reduce(self, piggybacked: Piggybacked, loss_divisor: float) -> Piggybacked:
        """As `Reducer.reduce`."""
        self._host.input.copy_(self.input)
        found = self._host.reduce(piggybacked, loss_divisor)
        self.output.copy_(self._host.output)
        return found


def to_host(tensor: Tensor) -> Tensor:
    """The tensor itself, if it lies in the host's memory, else a copy there."""
    return tensor.detach().to("cpu")


def give_back(values: Tensor, tensor: Tensor) -> None:
    """Put what was done to a tensor's copy into it."""
    if tensor.device.type != "cpu":
        tensor.detach().copy_(values)


def on_host(group: Collective) -> Collective:
    """The group by which the host's memory goes: itself, but for a staged one."""
    return group.host if isinstance(group, StagedCollective) else group
