"""Programs whose layers are cut, or lie on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import (
    fully_shard,
)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.backend.programs.models import (
    STEPS,
    WIDTH,
    Numbers,
    adam,
    batch,
    gpt,
    mesh_of,
    mlp,
    sums,
    taught,
)


def dtensor(folder: Path) -> Numbers:
    """Products of tensors that are cut in every way, and their redistribution."""
    mesh = mesh_of(dist.get_world_size())
    torch.manual_seed(0)
    x, w = torch.randn(5, 6).double(), torch.randn(6, 7).double()
    found = []
    for first in (Shard(0), Shard(1), Replicate()):
        for second in (Shard(0), Shard(1), Replicate()):
            product: Any = distribute_tensor(x, mesh, [first]) @ distribute_tensor(
                w, mesh, [second]
            )
            found.append(product.full_tensor().sum().item())
            found.append(product.redistribute(mesh, [Shard(1)]).to_local().sum().item())
            found.append(product.redistribute(mesh, [Shard(0)]).to_local().sum().item())
    return found


def tensor_parallel_mlp(folder: Path) -> Numbers:
    model = mlp()
    mesh = mesh_of(dist.get_world_size())
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    optimizer = adam(model)
    losses = []
    for step in range(STEPS):
        x, y = batch(step, rank=0)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses + sums(model)


def tensor_parallel_gpt(folder: Path) -> Numbers:
    model = gpt()
    mesh = mesh_of(dist.get_world_size())
    for block in model.blocks:
        plan: dict[str, ParallelStyle] = {
            name: ColwiseParallel() for name in ("query", "key", "value", "up")
        }
        plan |= {name: RowwiseParallel() for name in ("out", "down")}
        parallelize_module(block, mesh, plan)
    return taught(model, rank=0)


def sequence_parallel(folder: Path) -> Numbers:
    """Between the layers the sequence is cut, so they gather and scatter."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH)
    ).double()
    mesh = mesh_of(dist.get_world_size())
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    optimizer = adam(model)
    losses = []
    for step in range(3):
        x = batch(step, rank=0)[0].view(2, 4, WIDTH).repeat(1, dist.get_world_size(), 1)
        optimizer.zero_grad()
        whole = distribute_tensor(x, mesh, [Shard(1)])
        loss = (model(whole).full_tensor() - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def tensor_and_data_parallel(folder: Path) -> Numbers:
    """FSDP2 over one dimension of the mesh, layers cut over the other."""
    mesh = mesh_of(2, 2, names=("data", "model"))
    model = mlp()
    parallelize_module(model, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = adam(model)
    losses = []
    for step in range(STEPS):
        x, y = batch(step, rank=mesh["data"].get_local_rank())
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _pipeline(schedule: Any) -> Numbers:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(size)]
    stage = PipelineStage(stages[rank], rank, size, torch.device("cpu"))
    run = schedule(stage, n_microbatches=4, loss_fn=F.mse_loss)
    optimizer = adam(stages[rank])
    losses = []
    for step in range(STEPS):
        x, _ = batch(step, rank=0)
        optimizer.zero_grad()
        here: list[Tensor] = []
        if rank == 0:
            run.step(x)
        elif rank == size - 1:
            run.step(target=x.flip(1), losses=here)
        else:
            run.step()
        optimizer.step()
        losses += [loss.item() for loss in here]
    return losses + sums(stages[rank])


def gpipe(folder: Path) -> Numbers:
    return _pipeline(ScheduleGPipe)


def one_forward_one_backward(folder: Path) -> Numbers:
    return _pipeline(Schedule1F1B)
