"""Times plain torch programs and single operations on both backends, in turns, in one process."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import flush_denormals
from benchmarks.jobs.plain import mlp
from benchmarks.jobs.steps import adam

BACKENDS = ("spartito", "gloo")
SIZES = {"64 floats": 64, "1 MB": 1 << 18, "11 MB": 11 << 18}
REPEATS = {"64 floats": 200, "1 MB": 20, "11 MB": 4}
VOCABULARY, WIDTH, HEADS, BLOCKS, CONTEXT = 65, 128, 4, 4, 64

Step = Callable[[], object]


@dataclass(frozen=True)
class Task:
    """Something that runs on a group: ``make(group)`` gives what is timed, ``repeats`` times."""

    make: Callable[[Any], Step]
    repeats: int


def main() -> None:
    """Run the parts that the command line names; rank 0 prints seconds of all windows."""
    options = argparse.ArgumentParser()
    options.add_argument("parts", nargs="+", choices=PARTS)
    options.add_argument("--windows", type=int, required=True)
    given = options.parse_args()
    torch.set_num_threads(1)
    flush_denormals()
    dist.init_process_group(BACKENDS[0])
    groups = {BACKENDS[0]: dist.group.WORLD, BACKENDS[1]: dist.new_group(backend=BACKENDS[1])}
    found = {}
    for part in given.parts:
        for name, task in PARTS[part]().items():
            found[name] = race(task, groups, given.windows)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def race(task: Task, groups: Mapping[str, Any], windows: int) -> dict[str, list[float]]:
    """Seconds of one repeat in each window of each group; the first window warms up."""
    steps = {name: task.make(group) for name, group in groups.items()}
    found: dict[str, list[float]] = {name: [] for name in groups}
    for window in range(windows + 1):
        for name in groups if window % 2 == 0 else reversed(list(groups)):
            dist.barrier(groups[name])
            began = time.perf_counter()
            for _ in range(task.repeats):
                steps[name]()
            if window:
                found[name].append((time.perf_counter() - began) / task.repeats)
    return found


def operations() -> dict[str, Task]:
    """All single operations in all sizes; of those that gather or scatter, the whole is so big."""
    return {
        f"{name}, {size}": Task(partial(make, floats=floats), REPEATS[size])
        for size, floats in SIZES.items()
        for name, make in OPERATIONS.items()
    }


def _all_reduce(group: Any, floats: int) -> Step:
    tensor = torch.zeros(floats)
    return lambda: dist.all_reduce(tensor, group=group)


def _broadcast(group: Any, floats: int) -> Step:
    tensor = torch.zeros(floats)
    return lambda: dist.broadcast(tensor, 0, group=group)


def _all_gather(group: Any, floats: int) -> Step:
    whole, part = torch.zeros(floats), torch.zeros(floats // dist.get_world_size())
    return lambda: dist.all_gather_into_tensor(whole, part, group=group)


def _reduce_scatter(group: Any, floats: int) -> Step:
    whole, part = torch.zeros(floats), torch.zeros(floats // dist.get_world_size())
    return lambda: dist.reduce_scatter_tensor(part, whole, group=group)


def _all_to_all(group: Any, floats: int) -> Step:
    sent, received = torch.zeros(floats), torch.zeros(floats)
    return lambda: dist.all_to_all_single(received, sent, group=group)


def _send_and_receive(group: Any, floats: int) -> Step:
    """There and back between ranks 0 and 1."""
    tensor, rank = torch.zeros(floats), dist.get_rank()

    def call() -> None:
        if rank == 0:
            dist.send(tensor, 1, group)
            dist.recv(tensor, 1, group)
        else:
            dist.recv(tensor, 0, group)
            dist.send(tensor, 0, group)

    return call


OPERATIONS: dict[str, Callable[..., Step]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "send and recv, there and back": _send_and_receive,
}


def ddp_mlp() -> dict[str, Task]:
    """The MLP of the other benchmarks, local batch 32."""
    return {"DDP, MLP": Task(lambda group: _ddp(mlp(), group), 50)}


def ddp_large() -> dict[str, Task]:
    """11 MB of gradients."""

    def make(group: Any) -> Step:
        layers = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
        return _ddp(nn.Sequential(*layers, nn.Linear(1024, 1024)), group)

    return {"DDP, 11 MB of gradients": Task(make, 8)}


def _ddp(body: nn.Module, group: Any) -> Step:
    model = DistributedDataParallel(body, process_group=group)
    torch.manual_seed(dist.get_rank())
    batches = cycle([(torch.rand(32, 784), torch.randint(10, (32,))) for _ in range(16)])
    return _step(model, batches)


def _step(model: nn.Module, batches: Any) -> Step:
    optimizer = adam(model)

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()

    return step


class Block(nn.Module):
    """Attention and a feed-forward part, with a norm before each."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.packed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.packed(self.norms[0](x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        y: Tensor = self.down(F.gelu(self.up(self.norms[1](x))))
        return x + y


def fsdp_gpt() -> dict[str, Task]:
    """A GPT of 0.8 M parameters, cut by block with `fully_shard`; 4 texts of 64 tokens a rank."""

    def make(group: Any) -> Step:
        torch.manual_seed(0)
        blocks = [Block() for _ in range(BLOCKS)]
        model = nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY)
        )
        mesh = DeviceMesh.from_group(group, "cpu")
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        torch.manual_seed(dist.get_rank())
        texts = [torch.randint(VOCABULARY, (4, CONTEXT + 1)) for _ in range(16)]
        return _step(model, cycle([(text[:, :-1], text[:, 1:]) for text in texts]))

    return {"FSDP2, small GPT": Task(make, 5)}


PARTS: dict[str, Callable[[], dict[str, Task]]] = {
    "operations": operations,
    "mlp": ddp_mlp,
    "large": ddp_large,
    "fsdp": fsdp_gpt,
}

if __name__ == "__main__":
    main()
