"""Which optimizers a strategy accepts, and their state under the user's names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartito.engine.updates.optimizers import (
    check_optimizer,
    fuse,
    load_named_state,
    make_optimizer,
    named_state,
    optimizer_parameters,
    unwrap,
)
from spartito.errors import UserError


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def test_given_or_made() -> None:
    model = net()
    adam = torch.optim.Adam(model.parameters())
    assert make_optimizer(adam, model) is adam
    made = make_optimizer(lambda parameters: torch.optim.SGD(parameters, 0.5), model)
    assert optimizer_parameters(made) == list(model.parameters())
    with pytest.raises(UserError, match="the optimizer function returned list"):
        make_optimizer(list, model)  # type: ignore[arg-type]


def test_anothers_parameters_are_refused() -> None:
    with pytest.raises(UserError, match="4 of the optimizer's parameters are not the model's") as e:
        check_optimizer(torch.optim.SGD(net().parameters(), 0.1), net(), 1)
    assert "the first of shape (4, 3)" in str(e.value)


EVERY: list[Callable[[Any], torch.optim.Optimizer]] = [
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
]


@pytest.mark.parametrize("make", EVERY)
def test_state_goes_by_name_and_trains_on_alike(make: Any) -> None:
    model = net()
    optimizer = make(model.parameters())
    check_optimizer(optimizer, model, 2)  # fresh
    fuse(optimizer, model)
    train(model, optimizer, 3)
    with pytest.raises(UserError, match="with state of 4 parameters for 2 replicas"):
        check_optimizer(optimizer, model, 2)
    check_optimizer(optimizer, model, 1)

    saved = copy.deepcopy(named_state(model, optimizer))
    assert set(saved["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert saved["groups"][0]["params"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    twin = copy.deepcopy(model)
    other = make(twin.parameters())
    other.param_groups[0]["lr"] = 77.0
    load_named_state(twin, other, saved)
    train(model, optimizer, 3)
    train(twin, other, 3)
    # How the update is computed (fused or not) stays this machine's own: so not to the last bit.
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, two)


def test_what_is_loaded_is_a_copy() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1)
    saved = named_state(model, optimizer)
    twin = net()
    other = torch.optim.Adam(twin.parameters())
    load_named_state(twin, other, saved)
    before = saved["state"]["0.weight"]["exp_avg"].clone()
    train(twin, other, 2)
    assert torch.equal(saved["state"]["0.weight"]["exp_avg"], before)
    assert saved["state"]["0.weight"]["step"] == 1


def test_lbfgs_stays_on_one_device() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters())
    check_optimizer(optimizer, model, 1)
    with pytest.raises(UserError, match="LBFGS calls a closure"):
        check_optimizer(optimizer, model, 2)


def test_state_that_does_not_fit_is_refused() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1)
    saved = named_state(model, optimizer)
    small = nn.Sequential(nn.Linear(3, 4))
    with pytest.raises(UserError, match=r"state of 2\.weight, the model has not"):
        load_named_state(small, torch.optim.Adam(small.parameters()), saved)
    groups = [{"params": [p]} for p in model.parameters()]
    with pytest.raises(UserError, match="has 1 parameter groups, this one 4"):
        load_named_state(model, torch.optim.Adam(groups), saved)
    with pytest.raises(UserError, match="state of an optimizer Adam, this one is AdamW"):
        load_named_state(model, torch.optim.AdamW(model.parameters()), saved)

    class Own(torch.optim.Adam):
        """It goes on where its kind has ended."""

    load_named_state(model, Own(model.parameters()), saved)


def test_fused_where_the_user_did_not_choose() -> None:
    def fused(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Any:
        optimizer = make(net().parameters(), **options)
        fuse(optimizer, net())
        return optimizer.param_groups[0].get("fused")

    assert fused(torch.optim.Adam) is True
    assert fused(torch.optim.SGD) is True
    assert fused(torch.optim.Adam, fused=False) is False
    assert fused(torch.optim.Adam, foreach=True) is None
    assert fused(torch.optim.Adam, differentiable=True) is None
    assert fused(torch.optim.RMSprop) is None


@pytest.mark.parametrize("chosen", [None, True])
def test_momentum_of_16_bits_is_not_fused_on_cpus(chosen: bool | None) -> None:
    """torch's kernel reads memory that nobody wrote there: its results differ from call to call."""
    model = net().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=chosen)
    fuse(optimizer, model)
    assert optimizer.param_groups[0]["fused"] is False


def test_dampening_of_parameters_that_learn_later_is_torchs() -> None:
    def trained(fuses: bool) -> list[Tensor]:
        model = net()
        first, *_ = model.parameters()
        first.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        if fuses:
            fuse(optimizer, model)
        train(model, optimizer, 2)
        first.requires_grad_(True)
        optimizer.param_groups[0]["dampening"] = 0.3
        train(model, optimizer, 2)
        return [*model.parameters()]

    for found, expected in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_users_own_module() -> None:
    model = net()
    assert unwrap(model) is model
    assert unwrap(torch.compile(model, backend="eager")) is model  # type: ignore[arg-type]
