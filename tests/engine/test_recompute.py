"""Modules that compute their activations again: the same numbers, less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spartito as sp
from spartito.engine.modules.recompute import recompute
from tests.replicas import Replicas
from tests.strategies import sharded_jobs as jobs


@pytest.mark.parametrize(
    ("name", "count", "options"),
    [
        ("one_device", 1, {}),
        ("mirrored", 2, {}),
        ("sharded", 2, {"communication": "sockets", "block_bytes": 300}),
        ("pipeline", 2, {"microbatches": 1}),
    ],
)
def test_numbers_are_those_without(
    replicas: Replicas, name: str, count: int, options: dict[str, Any]
) -> None:
    expected = replicas(jobs.again, 1, "one_device", {}, False)[0]
    for found in replicas(jobs.again, count, name, options, True):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=0, abs=1e-12)


def kept(net: nn.Module, x: Tensor) -> int:
    """Bytes that a forward pass keeps for the backward pass, beside parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = net(x)
    assert out.requires_grad
    return sum(found.values())


def gpt() -> nn.Module:
    torch.manual_seed(1)
    return sp.models.GPT(11, 64, 6, 2, 32)


def test_less_is_kept() -> None:
    net, x = gpt(), torch.zeros(4, 64, dtype=torch.long)
    before = kept(net, x)
    recompute(net, True)
    assert kept(net, x) < before / 4
    assert [name for name, _ in net.named_parameters()] == [n for n, _ in gpt().named_parameters()]


def test_modules_are_chosen_by_class_size_and_function() -> None:
    blocks = [f"blocks.{number}" for number in range(6)]
    kind = type(gpt().get_submodule("blocks.0"))
    assert recompute(gpt(), True) == blocks
    assert recompute(gpt(), kind) == recompute(gpt(), [kind]) == blocks
    assert recompute(gpt(), lambda module: isinstance(module, kind)) == blocks
    assert recompute(gpt(), False) == []
    sized = recompute(gpt(), 12_000)
    assert sized
    assert all(name.startswith("blocks.") for name in sized)
    net = gpt()
    assert recompute(net, True) == recompute(net, True)
    assert kind in type(net.get_submodule("blocks.0")).__bases__  # not twice


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (True, "chooses no module of Linear"),
        (nn.Conv2d, "chooses no module of Linear"),
        (0, "1 or more"),
        (-5, "1 or more"),
        ("all", "a number of bytes"),
        ([nn.Linear, 3], "a number of bytes"),
    ],
)
def test_what_cannot_be_chosen_is_refused(chosen: Any, text: str) -> None:
    with pytest.raises(sp.UserError, match=text):
        sp.Trainer(nn.Linear(2, 2), checkpoint_activations=chosen, loss=nn.MSELoss())
