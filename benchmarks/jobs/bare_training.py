"""Trains the MLP with a bare parameter server: the least that any design does for a push.

Every process but the last trains: plain forward and backward, gradients copied to where they are
pushed, values copied into the model. The last one serves (`bare_servers`). Nobody looks whether
numbers are finite, counts, reads data, or may die. Rank 0 prints the seconds of every window.
"""

from __future__ import annotations

import argparse
import json
from itertools import accumulate, cycle, pairwise

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
from benchmarks.jobs.plain import Work, make_work
from benchmarks.jobs.steps import Plan, time_windows

WAYS = ("shared memory", "TCP")


def main() -> None:
    """Serve, or train and print."""
    options = argparse.ArgumentParser()
    options.add_argument("way", choices=WAYS)
    options.add_argument("--windows", type=int, required=True)
    options.add_argument("--steps", type=int, required=True)
    given = options.parse_args()
    torch.set_num_threads(1)
    flush_denormals()
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size() - 1
    together = dist.new_group(list(range(workers)))
    work = make_work("mlp", workers)
    floats = sum(parameter.numel() for parameter in work.model.parameters())
    shared = given.way == "shared memory"
    address: list[str | None] = [None]
    if rank == workers:
        made = SharedServer if shared else SocketServer
        server: BareServer = made(floats, workers)
        address = [server.address]
    dist.broadcast_object_list(address, src=workers)
    if rank < workers:
        assert address[0] is not None
        client: Client = (
            SharedClient(address[0], floats, rank) if shared else SocketClient(address[0], floats)
        )
        plan = Plan(given.windows, given.steps, "fp32")
        found = train(client, work, work.ready(rank, workers), plan, together)
        if rank == 0:
            print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def train(
    client: Client,
    work: Work,
    batches: list[tuple[Tensor, Tensor]],
    plan: Plan,
    together: dist.ProcessGroup,
) -> list[float]:
    """Seconds per step of every window but the first."""
    parameters = list(work.model.parameters())
    out, back = views(client.gradient, parameters), views(client.values, parameters)
    targets = [parameter.data for parameter in parameters]
    data = cycle(batches)

    def step() -> None:
        x, y = next(data)
        work.loss(work.model(x), y).backward()
        with torch.no_grad():
            torch._foreach_copy_(out, [p.grad for p in parameters if p.grad is not None])
            for parameter in parameters:
                parameter.grad = None
            client.exchange()
            torch._foreach_copy_(targets, back)

    return time_windows(step, plan, meet=lambda: dist.barrier(together))


def views(memory: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """The parts of flat ``memory`` that belong to ``parameters``, in their shapes."""
    ends = accumulate((parameter.numel() for parameter in parameters), initial=0)
    spans = zip(pairwise(ends), parameters, strict=True)
    return [memory[begin:end].view(parameter.shape) for (begin, end), parameter in spans]


if __name__ == "__main__":
    main()
