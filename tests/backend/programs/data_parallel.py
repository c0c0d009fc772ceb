"""Programs whose ranks have the whole model: DDP in all its ways, and ZeRO's optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.backend.programs.models import (
    STEPS,
    WIDTH,
    Numbers,
    adam,
    batch,
    gpt,
    mlp,
    sums,
    tokens,
    trained,
)


def ddp(folder: Path) -> Numbers:
    return trained(DDP(mlp()))


def ddp_many_buckets(folder: Path) -> Numbers:
    return trained(DDP(mlp(), bucket_cap_mb=0.001, gradient_as_bucket_view=True))


def ddp_sparse(folder: Path) -> Numbers:
    """Gradients of an embedding have the rows that this rank's batch looked up."""
    torch.manual_seed(0)
    table = nn.Embedding(20, WIDTH, sparse=True, dtype=torch.float64)
    model = DDP(nn.Sequential(table, mlp()))
    found: Numbers = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        torch.manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        loss = model(torch.randint(20, (dist.get_rank() * 3,))).square().sum()
        loss.backward()
        optimizer.step()
        found += [loss.item(), *sums(model)]
    return found


def ddp_static_graph(folder: Path) -> Numbers:
    return trained(DDP(mlp(), static_graph=True))


def ddp_unused_parameters(folder: Path) -> Numbers:
    """Odd ranks leave a layer out."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.extra = mlp(), nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x: Tensor) -> Any:
            return self.body(self.extra(x) if dist.get_rank() % 2 else x)

    torch.manual_seed(0)
    return trained(DDP(Sometimes(), find_unused_parameters=True))


def ddp_no_sync(folder: Path) -> Numbers:
    """Gradients of two batches before each exchange."""
    model = DDP(mlp())
    optimizer = adam(model)
    for step in range(STEPS):
        with model.no_sync():
            x, y = batch(2 * step)
            F.cross_entropy(model(x), y).backward()
        x, y = batch(2 * step + 1)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return sums(model)


def ddp_join(folder: Path) -> Numbers:
    """Rank 1 has two batches more than rank 0, and so on."""
    model = DDP(mlp())
    optimizer = adam(model)
    with model.join():
        for step in range(2 + 2 * dist.get_rank()):
            x, y = batch(step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return sums(model)


def zero_join(folder: Path) -> Numbers:
    """Uneven inputs for DDP and an optimizer whose state is cut."""
    model = DDP(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    with Join([model, optimizer]):
        for step in range(2 + dist.get_rank()):
            x, y = batch(step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return sums(model)


def ddp_buffers(folder: Path) -> Numbers:
    """Running statistics come from rank 0."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
    model = DDP(body)
    losses = trained(model)
    return losses + [buffer.double().sum().item() for buffer in model.buffers()]


def _hooked(hook: Any, state: Any = None) -> Numbers:
    model = DDP(mlp(torch.float32))
    model.register_comm_hook(state, hook)
    return trained(model)


def ddp_hook_all_reduce(folder: Path) -> Numbers:
    return _hooked(default_hooks.allreduce_hook)


def ddp_hook_fp16(folder: Path) -> Numbers:
    return _hooked(default_hooks.fp16_compress_hook)


def ddp_hook_bf16(folder: Path) -> Numbers:
    """By hand: torch keeps its own hook for NCCL."""
    return _hooked(_rounded)


def _rounded(state: None, bucket: dist.GradBucket) -> Any:
    tensor = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(tensor, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def ddp_hook_powersgd(folder: Path) -> Numbers:
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    return _hooked(powerSGD_hook.powerSGD_hook, state)


def ddp_hook_local_sgd(folder: Path) -> Numbers:
    state = post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=3)
    return _hooked(post_localSGD_hook.post_localSGD_hook, state)


def ddp_hook_of_ones_own(folder: Path) -> Numbers:
    return _hooked(_scaled)


def _scaled(state: None, bucket: dist.GradBucket) -> Any:
    """A hook of one's own: two operations after each other in one future."""
    tensor = bucket.buffer().div_(dist.get_world_size())
    first = dist.all_reduce(tensor, async_op=True).get_future()

    def then(future: Any) -> Any:
        return future.value()[0] * 2

    return first.then(then)


for hook in (_rounded, _scaled):
    hook.__annotations__.clear()  # DDP looks at them, and takes none that are text


def ddp_several_forwards(folder: Path) -> Numbers:
    """Two models side by side, and losses that are averaged by hand."""
    first, second = DDP(mlp()), DDP(gpt())
    both = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.AdamW(both, lr=0.01)
    losses = []
    for step in range(3):
        (x, y), (inputs, wanted) = batch(step), tokens(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(first(x), y)
        loss = loss + F.cross_entropy(second(inputs).flatten(0, 1), wanted.flatten())
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
    return losses


def ddp_compiled(folder: Path) -> Numbers:
    return trained(cast(nn.Module, torch.compile(DDP(mlp()), backend="aot_eager")), steps=3)


def ddp_profiled(folder: Path) -> Numbers:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        losses = trained(DDP(mlp()))
    return [*losses, float(len(profiler.events()) > 0)]


def zero_redundancy(folder: Path) -> Numbers:
    model = DDP(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    losses = trained(model, optimizer)
    optimizer.consolidate_state_dict()
    return losses


def sampler(folder: Path) -> Numbers:
    """The epochs of a loop with a DistributedSampler, and metrics reduced at the end of each."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(37, WIDTH).double(), torch.randint(4, (37,)))
    order: DistributedSampler[Any] = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=4, sampler=order)
    model = DDP(mlp())
    optimizer = adam(model)
    means = []
    for epoch in range(2):
        order.set_epoch(epoch)
        total = torch.zeros(2, dtype=torch.float64)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(total)
        means.append((total[0] / total[1]).item())
    return means


def evaluated(folder: Path) -> Numbers:
    """Predictions are gathered in inference mode."""
    model = DDP(mlp()).eval()
    with torch.inference_mode():
        found = model(batch(0)[0])
        every = [torch.empty_like(found) for _ in range(dist.get_world_size())]
        dist.all_gather(every, found)
        total = found.sum()
        dist.all_reduce(total)
        objects: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(objects, found.sum().item())
    dist.barrier()
    return [torch.cat(every).sum().item(), total.item(), *objects]


def through_operations(folder: Path) -> Numbers:
    """Gradients through the operations themselves."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x = (torch.arange(size * 3.0, dtype=torch.float64).view(size, 3) + rank).requires_grad_()
    total = differentiable.all_reduce(x * x).sum()
    total = total + (torch.stack(differentiable.all_gather(x.sin())) ** 2).sum()
    parts = [torch.empty(3, dtype=torch.float64) for _ in range(size)]
    total = total + sum((part**3).sum() for part in differentiable.all_to_all(parts, list(x.cos())))
    total = total + differentiable.broadcast(x, 0).exp().sum() * (rank + 1)
    total.backward()
    return [total.item(), *cast(Tensor, x.grad).flatten().tolist()]
