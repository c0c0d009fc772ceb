"""Times push + Adam + pull of a vector, ours and bare prototypes in turns; prints the windows.

The last process serves, with a server for each side; the others are workers. Sides end in
"shared memory" or "TCP". Of ours, "link" is what the prototypes do: gradient and values lie
ready in flat memory. "model" is what a training step does: the gradients of a model's tensors
are brought there and looked through for what is not finite, and the values are brought back.
The prototypes' "copied" does that too, but looks for nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common import flush_denormals
from benchmarks.jobs.bare_servers import (
    BareServer,
    Client,
    SharedClient,
    SharedServer,
    SocketClient,
    SocketServer,
)
from benchmarks.jobs.steps import adam
from spartito.collectives.membership.versions import Versions
from spartito.ps.client.link import Address, Link
from spartito.ps.client.servers import Servers
from spartito.ps.client.vector import Vector
from spartito.ps.protocol.layout import Span
from spartito.ps.protocol.memory import allocate
from spartito.ps.protocol.messages import End, Hello, Load, Push
from spartito.ps.protocol.options import settings
from spartito.ps.protocol.rules import Rules
from spartito.ps.server.server import Server
from spartito.ps.server.shard import Shard
from spartito.ps.server.snapshot import Snapshot
from spartito.ps.server.store import Store
from spartito.system import host_key
from spartito.wire.addresses import DRAWN, Endpoint
from spartito.wire.listening import listen

TIMEOUT = 120.0
TENSORS = 8
Group = dist.ProcessGroup
WAYS = ("shared memory", "TCP")
JOB = "benchmark"


def main() -> None:
    """Worker 0 prints ``{side: [seconds per exchange]}``."""
    options = argparse.ArgumentParser()
    options.add_argument("--floats", type=int, required=True, help=f"a multiple of {TENSORS}")
    options.add_argument("--repeats", type=int, required=True)
    options.add_argument("--windows", type=int, required=True)
    given = options.parse_args()
    torch.set_num_threads(1)
    flush_denormals()
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    rank, workers = dist.get_rank(), dist.get_world_size() - 1
    together = dist.new_group(list(range(workers)))
    model = Weights(given.floats)
    addresses: list[dict[str, str] | None] = [None]
    if rank == workers:
        serving = Serving(model, workers)
        addresses = [serving.addresses]
    dist.broadcast_object_list(addresses, src=workers)
    assert addresses[0] is not None
    if rank == workers:
        serving.wait()
    else:
        torch.manual_seed(rank)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        found = work(model, addresses[0], given.repeats, given.windows, together)
        if rank == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


class Weights(nn.Module):
    """A model of ``floats`` parameters in equal tensors."""

    def __init__(self, floats: int) -> None:
        super().__init__()
        each = floats // TENSORS
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(each)) for _ in range(TENSORS))


class Serving:
    """The server of every side, each with threads of its own."""

    def __init__(self, model: nn.Module, workers: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._threads: list[threading.Thread] = []
        floats = sum(parameter.numel() for parameter in model.parameters())
        self._bare: dict[str, BareServer] = {  # kept: the shared one owns its mapping's folder
            "shared memory": SharedServer(floats, workers),
            "TCP": SocketServer(floats, workers),
        }
        self.addresses = {f"prototype, {way}": bare.address for way, bare in self._bare.items()}
        self.addresses |= {f"spartito, {way}": self._start(way, model, workers) for way in WAYS}

    def wait(self) -> None:
        """Return when worker 0 has ended ours; the bare ones end with the process."""
        for thread in self._threads:
            thread.join()

    def _start(self, way: str, model: nn.Module, workers: int) -> str:
        optimizer = adam(model)
        vector = Vector(model, optimizer)
        shard = Shard(vector.layout, whole(vector), optimizer, vector.tensors)
        listener = listen(Endpoint("ps", "127.0.0.1", (DRAWN,)), TIMEOUT)
        server = Server(
            Store(shard, Rules(workers), gates=True, log=None),
            listener,
            name="ps",
            chief="worker 0",
            wire_dtype=None,
            timeout=TIMEOUT,
            snapshot=Snapshot(Path(self._folder.name, f"{way}.safetensors"), "ps 0"),
            seconds=10 * TIMEOUT,
            shares=way == "shared memory",
        )
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        self._threads.append(thread)
        return str(listener.getsockname()[1])


def work(
    model: nn.Module, addresses: Mapping[str, str], repeats: int, windows: int, group: Group
) -> dict[str, list[float]]:
    """Seconds per exchange in every window of every side but the first, which warms up."""
    rank, workers = group.rank(), group.size()
    vector = Vector(model, adam(model))
    floats = vector.layout.size // vector.tensors[0].itemsize
    bare: tuple[Client, ...] = (
        SharedClient(addresses["prototype, shared memory"], floats, rank),
        SocketClient(addresses["prototype, TCP"], floats),
    )
    calls: dict[str, Callable[[], None]] = {}
    for way, client in zip(WAYS, bare, strict=True):
        client.gradient.normal_()
        calls[f"prototype, {way}"] = client.exchange
        calls[f"copied, {way}"] = by_copies(client, model)
    ports = [int(addresses[f"spartito, {way}"]) for way in WAYS]
    chiefs = [begin(vector, port, workers) for port in ports] if rank == 0 else []
    dist.barrier(group)  # the values are there
    links = [join(vector, port, rank, workers, way) for port, way in zip(ports, WAYS, strict=True)]
    for way, link in zip(WAYS, links, strict=True):
        keys = work_items(rank)
        calls[f"link, {way}"] = by_link(link, keys)
        calls[f"model, {way}"] = by_model(Servers([link], vector, waits=False), keys)
    found = take_turns(calls, repeats, windows, group)
    dist.barrier(group)
    for link in links:
        link.close()
    for chief in chiefs:
        chief.ask(End())
        chief.close()
    return found


def take_turns(
    calls: Mapping[str, Callable[[], None]], repeats: int, windows: int, group: Group
) -> dict[str, list[float]]:
    """Seconds per call in every window; all workers begin each together."""
    found: dict[str, list[float]] = {side: [] for side in calls}
    for number in range(windows + 1):
        # Every second round runs backwards, so that no side always follows the same one.
        for side in calls if number % 2 == 0 else reversed([*calls]):
            dist.barrier(group)
            began = time.perf_counter()
            for _ in range(repeats):
                calls[side]()
            found[side].append((time.perf_counter() - began) / repeats)
    return {side: seconds[1:] for side, seconds in found.items()}


def by_copies(client: Client, model: nn.Module) -> Callable[[], None]:
    """The prototype's exchange, with the model's gradients brought in and its values out."""
    tensors = [parameter.detach() for parameter in model.parameters()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    sizes = [tensor.numel() for tensor in tensors]
    into, out = client.gradient.split(sizes), client.values.split(sizes)

    def exchange() -> None:
        torch._foreach_copy_(into, gradients)
        client.exchange()
        torch._foreach_copy_(tensors, out)

    return exchange


def by_link(link: Link, keys: Iterator[tuple[int, int, int, int]]) -> Callable[[], None]:
    """A push of what lies in the link's memory, and its reply."""
    link.push.view(torch.float32).normal_()

    def exchange() -> None:
        link.ask(push_of(next(keys)))

    return exchange


def by_model(servers: Servers, keys: Iterator[tuple[int, int, int, int]]) -> Callable[[], None]:
    """A push of the model's gradients, and new values into the model."""

    def exchange() -> None:
        absent, _ = servers.fill()
        servers.push(push_of(next(keys)), absent)
        servers.replies()

    return exchange


def push_of(key: tuple[int, int, int, int]) -> Push:
    """A push of one work item."""
    return Push([key], pulled=0, weight=1.0, examples=32, absent=[])


def work_items(worker: int) -> Iterator[tuple[int, int, int, int]]:
    """The work items of a worker, which are new every time."""
    return ((0, 0, step, worker) for step in count())


def begin(vector: Vector, port: int, workers: int) -> Link:
    """The chief's link, with the server's values given."""
    link = _link(vector, port, -1, workers, "TCP", chief=True)
    values: Tensor = allocate(whole(vector))
    link.load(Load(JOB, settings(adam(nn.Linear(1, 1))), 0), values, {})
    return link


def join(vector: Vector, port: int, rank: int, workers: int, way: str) -> Link:
    """A worker's link."""
    link = _link(vector, port, rank, workers, way, chief=False)
    if link.shared != (way == "shared memory"):
        raise OSError(f"{way} was asked for, and shared memory is {link.shared}")
    return link


def _link(vector: Vector, port: int, worker: int, workers: int, way: str, chief: bool) -> Link:
    hello = Hello(
        task=f"worker {worker}",
        worker=worker,
        chief=chief,
        job=JOB,
        digest=vector.layout.digest,
        versions=Versions.own(),
        rules=str(Rules(workers)),
        host=host_key() if way == "shared memory" else "",
    )
    address = Address("ps", "127.0.0.1", port)
    return Link([address], hello, whole(vector), vector, None, TIMEOUT)


def whole(vector: Vector) -> Span:
    """All of it on one server."""
    return Span(0, vector.layout.size)


if __name__ == "__main__":
    main()
