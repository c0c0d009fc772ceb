"""Programs whose parameters are cut, and their checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from tests.backend.programs.models import (
    Numbers,
    adam,
    gpt,
    mesh_of,
    mlp,
    sums,
    taught,
    trained,
)


def fsdp1(folder: Path) -> Numbers:
    return trained(FullyShardedDataParallel(mlp(), device_id=torch.device("cpu")))


def fsdp1_state(folder: Path) -> Numbers:
    """The parameters put together again."""
    model = FullyShardedDataParallel(
        mlp(),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    )
    losses = trained(model)
    with FullyShardedDataParallel.summon_full_params(model):
        return losses + sums(model)


def fsdp2(folder: Path) -> Numbers:
    model = mlp()
    mesh = mesh_of(dist.get_world_size())
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = trained(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert isinstance(norm, DTensor)
    return [*losses, norm.full_tensor().item()]


def fsdp2_mixed(folder: Path) -> Numbers:
    model = mlp(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh_of(dist.get_world_size()), mp_policy=policy)
    return trained(model)


def fsdp2_gpt(folder: Path) -> Numbers:
    model = gpt()
    mesh = mesh_of(dist.get_world_size())
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return taught(model)


def hsdp(folder: Path) -> Numbers:
    """Sharded in pairs, the pairs replicas of each other."""
    model = mlp()
    mesh = mesh_of(2, 2, names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    return trained(model)


def hsdp1(folder: Path) -> Numbers:
    model = FullyShardedDataParallel(
        mlp(),
        device_id=torch.device("cpu"),
        device_mesh=mesh_of(2, 2, names=("replicate", "shard")),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )
    return trained(model)


def _sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp()
    fully_shard(model, mesh=mesh_of(dist.get_world_size()))
    return model, adam(model)


def saved_and_loaded(folder: Path) -> Numbers:
    """A run that goes on from a checkpoint of cut parameters."""
    model, optimizer = _sharded()
    trained(model, optimizer, steps=2)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "sync")
    later, its_optimizer = _sharded()
    with torch.no_grad():
        for parameter in later.parameters():
            parameter.zero_()
    weights, state = get_state_dict(later, its_optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / "sync")
    set_state_dict(later, its_optimizer, model_state_dict=weights, optim_state_dict=state)
    return trained(model, optimizer, 2) + trained(later, its_optimizer, 2)


def saved_asynchronously(folder: Path) -> Numbers:
    """Written by a thread while training goes on."""
    model, optimizer = _sharded()
    trained(model, optimizer, steps=2)
    kept = copy.deepcopy(sums(model))
    group = dist.new_group(backend="gloo")
    weights, _ = get_state_dict(model, optimizer)
    future: Any = dcp.async_save(
        {"model": weights}, checkpoint_id=folder / "async", process_group=group
    )
    losses = trained(model, optimizer, steps=2)
    future.result()
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights}, checkpoint_id=folder / "async")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert sums(model)[::2] == kept[::2]
    return losses
