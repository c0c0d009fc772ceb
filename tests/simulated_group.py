"""What NCCL is to GPUs, for the simulated accelerator: a process group for its tensors alone.

gloo moves their memory, without a copy; torch takes a mean there, which gloo does not know. A
process that has called `begin` has it for as long as it lives, with a device for each task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from spartito.backend.identity import Identity
from spartito.backend.work import Done
from tests import simulated

NAME = "simccl"
DEVICES = 4


class Module(simulated.Module):
    """``torch.sim`` with more devices, and with streams: whatever they are asked for is done."""

    def device_count(self) -> int:
        return DEVICES

    def Stream(self, device: Any = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(self._named(device))

    def Event(self, *args: Any, **options: Any) -> torch.Event:
        return torch.Event(self._named(None))

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(self._named(device))

    @contextmanager
    def stream(self, stream: torch.Stream) -> Iterator[None]:
        yield

    def _named(self, device: Any) -> torch.device:
        return torch.device(simulated.NAME, self.current_device()) if device is None else device


def begin() -> None:
    """Be one of up to four tasks with a simulated accelerator each, and a process group for it."""
    simulated.register(Module())
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, SimulatedGroup, devices=[simulated.NAME])


class Moving(Done):
    """A call that gloo may still be at."""

    def __init__(self, call: Any, written: Any, after: Callable[[], None]) -> None:
        super().__init__(written)
        self._call, self._after, self._is_over = call, after, False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for it."""
        if not self._is_over:
            self._call.wait()
            self._after()
            self._is_over = True
        return True

    synchronize = block_current_stream = wait  # type: ignore[assignment]

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._is_over or bool(self._call.is_completed())

    is_success = is_completed

    def get_future(self) -> Any:
        """A future that has what was written."""
        self.wait()
        return super().get_future()

    get_future_result = get_future


def _passed_on(name: str) -> Callable[..., Moving]:
    """The method of a group that has gloo's of a name."""

    def call(self: SimulatedGroup, *given: Any, **more: Any) -> Moving:
        return self._call(name, *given, **more)

    return call


class SimulatedGroup(Identity):
    """Tasks with a device each.

    Args:
        store: The store of the group.
        rank: Our rank in it.
        size: The number of its ranks.
        timeout: How long a wait for another rank may take.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size, store, timeout)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    def name(self) -> str:
        """The name of the backend."""
        return NAME

    getBackendName = _get_backend_name = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(simulated.NAME)]

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long a wait for another rank may take, from now on."""
        super().set_timeout(timeout)
        self._gloo._set_default_timeout(timeout)

    allreduce = _passed_on("allreduce")
    allreduce_coalesced = _passed_on("allreduce_coalesced")
    reduce = _passed_on("reduce")
    broadcast = _passed_on("broadcast")
    allgather = _passed_on("allgather")
    all_gather_single = _allgather_base = _passed_on("_allgather_base")
    gather = _passed_on("gather")
    scatter = _passed_on("scatter")
    reduce_scatter = _passed_on("reduce_scatter")
    reduce_scatter_single = _reduce_scatter_base = _passed_on("_reduce_scatter_base")
    all_to_all_single = alltoall_base = _passed_on("alltoall_base")
    send = _passed_on("send")
    recv = _passed_on("recv")
    barrier = _passed_on("barrier")

    def shutdown(self) -> None:
        """Leave the group."""
        self._gloo.shutdown()

    abort = shutdown

    def _call(self, name: str, *given: Any, **more: Any) -> Moving:
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        if any(tensor.device.type != simulated.NAME for tensor in tensors):
            raise RuntimeError(f"{NAME} moves no tensors of a CPU")  # as NCCL: no backend for them
        means = [opts for opts in given if getattr(opts, "reduceOp", None) == dist.ReduceOp.AVG]
        for opts in means:
            opts.reduceOp = dist.ReduceOp.SUM
        lent = tree_map(lambda one: _lent(one) if isinstance(one, Tensor) else one, given)
        written = given[0] if given else ()

        def after() -> None:
            for opts in means:
                opts.reduceOp = dist.ReduceOp.AVG
                for each in tree_leaves(written):
                    each.div_(self._size)

        return Moving(getattr(self._gloo, name)(*lent, **more), written, after)


def _lent(tensor: Tensor) -> Tensor:
    """The same memory, as gloo takes it."""
    found: Tensor = torch.ops.sim.lent(tensor.detach())
    return found
