"""Collectives of torch's process groups: NCCL for GPUs, or gloo where it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from math import isnan, nan
from typing import Any

import torch
import torch.distributed as dist

# Its functions keep the world group of the time of its import as a default argument. Imported
# later (torch.optim does so), they would keep gloo's threads alive beyond `close`, and a thread
# that lets go of a tensor while the interpreter ends aborts the process.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from spartito.accelerators import group_backend
from spartito.collectives.calls import OF_CPU, CurrentCall, encode
from spartito.collectives.collective import (
    HALF,
    MAX_PIGGYBACKED,
    Collective,
    Number,
    Piggybacked,
    Reducer,
    Traffic,
    add_piggybacked,
    added,
    left,
    scale_of,
)
from spartito.collectives.membership.liveness import GRACE, LivenessCheck
from spartito.collectives.membership.store import Membership
from spartito.collectives.membership.torch_store import for_torch
from spartito.errors import SpartitoError, UserError, install_excepthook
from spartito.heartbeat import resume, waits
from spartito.waiting import HalfTime, Waiting

GLOO_AT_ADDRESS = "gloo_at_address"
"""gloo as a backend that takes options: torch drops those that are given to its own "gloo", which
then guesses an address by the machine's name, a loopback one on Debian."""


_SCALARS = encode("reduce", 0, torch.float64)


def gloo_options(address: str, limit: timedelta) -> Any:
    """Options by which gloo listens at ``address`` of this machine; waits end after ``limit``."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = limit
    return options


def _gloo(group: Any, options: Any) -> Any:
    """The backend, from what torch says of the group and from `gloo_options`."""
    return dist.ProcessGroupGloo(group.store, group.group_rank, group.group_size, options)


def _of_some(
    ranks: Sequence[int],
    rank: int,
    name: str,
    backend: str,
    store: dist.Store,
    options: Any,
    limit: timedelta,
) -> dist.ProcessGroup:
    """As `dist.new_group` for its members alone, however many other groups each of them is in.

    That function names a group by how many its process has already, so that tasks which are in
    different ones would wait for each other under different names.
    """
    full_name: Any = f"{name} of {list(ranks)}"  # a type of its own in some releases of torch
    made: tuple[dist.ProcessGroup, object] = c10d._new_process_group_helper(
        len(ranks), rank, list(ranks), backend, store, full_name, options, limit
    )
    c10d._world.pg_group_ranks[made[0]] = {member: n for n, member in enumerate(ranks)}
    return made[0]


dist.Backend.register_backend(
    GLOO_AT_ADDRESS, _gloo, extended_api=True, devices=dist.Backend.backend_capability["gloo"]
)


class ProcessGroupCollective(Collective):
    """A group of tasks behind a process group of ``torch.distributed``.

    Errors of the backend name no rank: tasks that live sign in at the store, and those that do
    not are named.

    Where it moves tensors of a device, the same tasks have a group of the host beside it. All that
    the host has to know goes there: who is at which call, what rides along, tensors of a CPU. So a
    call that moves a device's tensors is asked for and not waited for.

    Args:
        group: The tasks.
        device: Where its tensors are: the backend is that which torch has for it.
        address: This process's own address as the others see it, so that gloo does not have to
            guess an interface; None leaves it to gloo.
        ranks: The ranks of the tasks in the default process group, which has to exist; None makes
            the default one.
        name: Of the group, by which its tasks find each other there.
        host: The same tasks, for the host's memory; None where the backend moves that itself.
    """

    process_group: dist.ProcessGroup
    """What torch's own functions take as ``group`` or ``process_group``."""
    is_gloo: bool

    def __init__(
        self,
        group: Membership,
        device: torch.device,
        address: str | None = None,
        ranks: Sequence[int] | None = None,
        name: str = "",
        host: Collective | None = None,
    ) -> None:
        super().__init__()
        self.rank = group.rank
        self.world_size = group.size
        self.names = group.names
        self.host = host
        self._liveness = LivenessCheck(group)
        self._half, self._limit = HalfTime(group.timeout), group.timeout
        self.waiting = Waiting(self.rank, group.names)
        if host is not None:
            host.traffic, host.moved = self.traffic, lambda: self.moved()
            self.waiting = host.waiting
            self.follow(self.current_call)
        self._device = torch.device(device.type)
        self._sent: dict[tuple[int, int], tuple[dist.Work, Tensor]] = {}
        limit = timedelta(seconds=group.timeout)
        options: Any = None
        backend = group_backend(device.type)
        if backend is None:
            raise UserError(f"torch has no process group for {device}", "Take 'auto'.")
        self.is_gloo = backend == "gloo"
        if backend == "gloo" and address:
            backend, options = GLOO_AT_ADDRESS, gloo_options(address, limit)

        def join() -> None:
            with self._named():
                if ranks is not None:
                    assert self._store is not None
                    self.process_group = _of_some(
                        ranks, self.rank, name, backend, self._store, options, limit
                    )
                    return
                dist.init_process_group(
                    backend,
                    store=self._store,
                    rank=self.rank,
                    world_size=self.world_size,
                    timeout=limit,
                    pg_options=options,
                )
                self.process_group = c10d._get_default_group()

        # torch calls the object of Python for as long as the group lives, and does not keep it.
        self._store: dist.Store | None = for_torch(group.under("group").store, group.timeout)
        self._joined = True
        group.ask(join, group.timeout + 2 * GRACE)  # the error itself takes a while to name a task
        install_excepthook()  # torch has put its own before ours, which drops the exit code

    @property
    def device_type(self) -> str:
        """The type of device whose tensors the backend moves: others are copied first."""
        return self._device.type

    @property
    def timeout(self) -> float:
        """Seconds that a wait for another task may take."""
        return self._limit

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        if seconds != self._limit:
            backend = self.process_group._get_backend(self._device)
            backend._set_default_timeout(timedelta(seconds=seconds))
            self._limit = seconds
            if self.host is not None:
                self.host.timeout = seconds

    def follow(self, current_call: CurrentCall) -> None:
        super().follow(current_call)
        if self.host is not None:
            self.host.follow(current_call)

    def send(self, tensor: Tensor, target: int, tag: int) -> None:
        """Leave a copy of ``tensor`` for rank ``target``, without waiting for it.

        The next message with this tag waits until this one has been received.
        """
        earlier = self._sent.pop((target, tag), None)
        if self.host is not None:  # a device tells what has gone; gloo only who waits for it
            self._sent = {k: sent for k, sent in self._sent.items() if not sent[0].is_completed()}
        with self._named():
            if earlier is not None:
                earlier[0].wait()
            shown = movable(tensor.detach().clone(memory_format=torch.contiguous_format))
            self._sent[target, tag] = self.process_group.send([shown], target, tag), shown

    def receive(self, tensor: Tensor, source: int, tag: int) -> None:
        """Fill ``tensor`` with what rank ``source`` sends by this tag."""
        self.receiving(tensor, source, tag)()

    def receiving(self, tensor: Tensor, source: int, tag: int) -> Callable[[], None]:
        """As `receive`, which the function that is returned completes: others run beside it."""
        with self._named():
            work = self.process_group.recv([movable(tensor)], source, tag)

        def wait() -> None:
            with self._named():
                work.wait()

        return wait

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        if self.host is not None and tensor.is_cpu:
            with self._on_host() as host:
                return host.all_reduce(tensor)
        return self._in_place(tensor, lambda flat: dist.all_reduce(flat, group=self.process_group))

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        if self.host is not None and tensor.is_cpu:
            with self._on_host() as host:
                return host.all_gather(tensor)
        self.synchronize()
        return [part.to(tensor.device) for part in self._gathered(self._here(tensor))]

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, of the backend's own device as this one is."""
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self._named():
            dist.all_gather([*map(movable, parts)], movable(tensor), self.process_group)
        return parts

    def _reduce_scatter(self, rows: Tensor) -> Tensor:
        return added(self._all_to_all(rows))

    def _all_to_all(self, rows: Tensor) -> Tensor:
        if self.host is not None and rows.is_cpu:
            with self._on_host() as host:
                return host.all_to_all(rows)
        self.synchronize()
        out = self._here(rows)
        came = torch.empty_like(out)
        with self._named():
            dist.all_to_all_single(movable(came), movable(out), group=self.process_group)
        return came.to(rows.device)

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        if self.host is not None and tensor.is_cpu:
            with self._on_host() as host:
                return host.broadcast(tensor, source)

        def call(flat: Tensor) -> object:
            return dist.broadcast(movable(flat), group=self.process_group, group_src=source)

        return self._in_place(tensor, call)

    def _barrier(self) -> None:
        self.synchronize()

    def _reducer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Reducer:
        if self.host is not None and device.type == "cpu":
            with self._on_host() as host:
                return host.reducer(numel, dtype, device)
        self.synchronize()
        return ProcessGroupReducer(self, torch.zeros(numel, dtype=dtype, device=device))

    def synchronize(self, piggybacked: Piggybacked = ()) -> Piggybacked:
        """The sum of each piggybacked scalar, once all have come to the same call.

        What moves first is alike in every call: gloo aborts the process where sizes differ, and
        waits for ever where operations do.
        """
        if not self._joined:
            raise left()
        if self.host is None:
            return add_piggybacked(self._met(piggybacked))
        with self._on_host(0) as host:
            if not piggybacked:
                host.barrier()
                return ()
            return tuple(host.all_reduce(torch.tensor(piggybacked, dtype=torch.float64)).tolist())

    def gather_scalars(self, numbers: Sequence[Number]) -> Scalars:
        """The ``numbers`` of all replicas, of which those of a device are not waited for."""
        with self.current_call.call(_SCALARS):
            if self.host is None:
                rows = self._met([float(each) for each in numbers])
                return Scalars(add_piggybacked(rows), rows)
            own = torch.tensor([unless_there(each) for each in numbers], dtype=torch.float64)
            with self._on_host() as host:
                rows = [tuple(part.tolist()) for part in host.all_gather(own)]
            return Scalars(self.sums(numbers, add_piggybacked(rows)), rows)

    def sums(self, numbers: Sequence[Number], on_host: Sequence[float]) -> list[Number]:
        """The sum of each number; those that only devices know are added up there.

        Args:
            numbers: As many on each task, once all have met.
            on_host: The sums of what `unless_there` gives for them, and perhaps more.

        Returns:
            Numbers of the host, and scalars in fp64 for which nobody waits.
        """
        there = [each for each, total in zip(numbers, on_host, strict=False) if isnan(total)]
        found = iter(self.gather_there(there).sum(0).unbind() if there else ())
        return [
            next(found) if isnan(total) else total
            for _, total in zip(numbers, on_host, strict=False)
        ]

    def gather_there(self, numbers: Sequence[Number]) -> Tensor:
        """The numbers of all tasks on the device, for which nobody waits.

        Args:
            numbers: As many on each task, once all have met.

        Returns:
            ``(world_size, len(numbers))`` in fp64.
        """
        own = torch.zeros(len(numbers), dtype=torch.float64, device=self._device)
        for slot, each in zip(own, numbers, strict=True):
            slot.copy_(each) if isinstance(each, Tensor) else slot.fill_(each)
        return torch.stack(self._gathered(own))

    def _met(self, numbers: Sequence[float]) -> list[Piggybacked]:
        """The numbers of each replica, once all have come to the same call."""
        own = torch.zeros(1 + MAX_PIGGYBACKED, dtype=torch.float64)
        own[1 : 1 + len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        own.view(torch.int64)[0] = self.current_call.tag
        came = torch.stack(self._gathered(own.view(torch.int64)))
        for peer, word in enumerate(came[:, 0].tolist()):
            self._compare(peer, word)
        return [tuple(row) for row in came.view(torch.float64)[:, 1 : 1 + len(numbers)].tolist()]

    @contextmanager
    def _on_host(self, mark: int = OF_CPU) -> Generator[Collective]:
        """The host's group; those who wait for the device hear why it failed.

        A call that ``mark`` is part of is another one than that of the device's tensors.
        """
        assert self.host is not None
        if not self._joined:
            raise left()
        try:
            with self.current_call.marked(mark):
                yield self.host
        except SpartitoError as error:
            self._liveness.leave(error, self.close)
            raise

    def sum(self, tensor: Tensor) -> None:
        """Sum one block over the replicas, in place, after a `synchronize`."""
        self.traffic.moved(tensor.nbytes)
        with self._named():
            dist.all_reduce(tensor, group=self.process_group)

    def summing(self, *tensors: Tensor) -> Callable[[], None]:
        """As `Collective.summing`, once all have met; 16-bit numbers are summed in fp32."""
        if self.host is not None and all(tensor.is_cpu for tensor in tensors):
            return self.host.summing(*tensors)

        def run() -> None:
            for tensor in tensors:
                self._sum_halves(tensor) if tensor.dtype in HALF else self.sum(tensor)

        return run

    def gathering(self, tensor: Tensor) -> Callable[[], list[Tensor]]:
        """As `Collective.gathering`, once all have met."""
        if self.host is not None and tensor.is_cpu:
            return self.host.gathering(tensor)
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]

        def run() -> list[Tensor]:
            self.traffic.moved(tensor.nbytes)
            with self._named():
                dist.all_gather(parts, tensor, self.process_group)
            return parts

        return run

    def _sum_halves(self, tensor: Tensor) -> None:
        """Each rank adds up a slice, in rank order, and rounds once."""
        self.traffic.moved(tensor.nbytes)
        size = -(-len(tensor) // self.world_size)
        own = tensor.new_zeros(size * self.world_size)
        own[: len(tensor)] = tensor
        came = torch.empty_like(own)
        with self._named():
            dist.all_to_all_single(came, own, group=self.process_group)
            total = added(came.view(self.world_size, size))
            dist.all_gather(list(own.split(size)), total, self.process_group)
        tensor.copy_(own[: len(tensor)])

    def by_torch(self, nbytes: int) -> AbstractContextManager[object]:
        """A block in which torch itself moves so many bytes by `process_group`.

        Errors in it name the task that is missing.

        Args:
            nbytes: What each task sends.

        Returns:
            The block.

        Raises:
            UserError: This task has left the others.
        """
        if not self._joined:
            raise left()
        self.traffic.moved(nbytes)
        return self._named()

    def close(self) -> None:
        self._sent.clear()  # what was sent keeps connections open, which others take for alive
        if self._joined and dist.is_initialized():  # it may be another's by now
            dist.destroy_process_group(self.process_group)
            del self.process_group  # its store goes with it
        self._joined, self._store = False, None
        self.__dict__.pop("process_group", None)  # it holds the store, and so the job's address
        self._liveness.close()
        self._half.close()
        if self.host is not None:
            self.host.close()

    def heartbeat(self) -> None:
        if self.host is not None:
            self.host.heartbeat()

    def abort(self, error: SpartitoError) -> None:
        if self.host is not None:
            self.host.abort(error)
        self._liveness.leave(error, self.close)

    def _here(self, tensor: Tensor) -> Tensor:
        """The values as one block on the device that the backend can reach."""
        return tensor.detach().to(self._device).contiguous()

    def _in_place(self, tensor: Tensor, call: Callable[[Tensor], object]) -> Tensor:
        self.synchronize()
        flat = self._here(tensor)
        with self._named():
            call(flat)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat)
        return tensor

    def _named(self) -> _Named:
        return _Named(self._liveness, self.traffic, self._half)


MOVED = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int8, torch.uint8,
}  # fmt: skip
"""The dtypes that gloo and NCCL know both."""


def movable(block: Tensor) -> Tensor:
    """The same memory as a backend can move it: other dtypes than `MOVED` as bytes."""
    return block if block.dtype in MOVED else block.view(-1).view(torch.uint8)


def works_there(group: Collective) -> ProcessGroupCollective | None:
    """The group, where it moves tensors of a device there, and has the host know nothing of them.

    Args:
        group: Of any kind.

    Returns:
        None for one that goes by the host's memory.
    """
    is_there = isinstance(group, ProcessGroupCollective) and group.host is not None
    return group if is_there else None  # type: ignore[return-value]


def unless_there(number: Number) -> float:
    """A number as the host knows it; NaN for one of a device."""
    return nan if isinstance(number, Tensor) else number


@dataclass(frozen=True, slots=True)
class Scalars:
    """A few numbers of each replica.

    Attributes:
        sums: Over the replicas; of what a device alone knows they are there.
        rows: The numbers of each, with NaN for those.
    """

    sums: Sequence[Number]
    rows: Sequence[Piggybacked]


class _Named:
    """Turns the backend's error into one that names the task, and counts the time."""

    def __init__(self, liveness: LivenessCheck, traffic: Traffic, half: HalfTime) -> None:
        self._liveness, self._traffic, self._half = liveness, traffic, half

    def __enter__(self) -> None:
        self._began, self._before = time.perf_counter(), waits()
        self._half.since = self._began

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._half.since = None
        self._traffic.waited += time.perf_counter() - self._began
        if isinstance(error, RuntimeError):
            raise self._liveness.lost(error) from error
        resume(self._before)


class ProcessGroupReducer:
    """The sum of a flat tensor, after a meeting that brings the piggybacked scalars."""

    def __init__(self, group: ProcessGroupCollective, flat: Tensor) -> None:
        self._group = group
        self.input = self.output = flat

    def reduce(self, piggybacked: Piggybacked, loss_divisor: float) -> Piggybacked:
        """As `Reducer.reduce`."""
        total = self._group.synchronize(piggybacked)
        if self.input.numel():
            self._group.sum(self.input)
        if (factor := scale_of(total[0], loss_divisor)) != 1.0:
            self.output.mul_(factor)
        return total
