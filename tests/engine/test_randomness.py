"""Random numbers are drawn for the global batch: every split sees its own rows of the same ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import spartito as sp
from spartito.collectives.collective import IdentityCollective
from spartito.data.reading.order import shard_rows
from spartito.engine.randomness.global_randomness import globalize
from spartito.engine.step_context import StepContext, enter, within
from spartito.errors import UserError


class Drops(nn.Module):
    """Two dropouts of ones, the first of them twice."""

    def __init__(self, p: float = 0.4) -> None:
        super().__init__()
        self.first, self.second = nn.Dropout(p), nn.Dropout1d(p)
        globalize(self)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x), self.first(x), self.second(x)], 1)


def masks(net: nn.Module, size: int, offsets: range, *, seed: int = 1, step: int = 0) -> Tensor:
    where = torch.arange(offsets.start, offsets.stop)
    with within(StepContext(IdentityCollective(), seed, step, size, where)):
        found: Tensor = net(torch.ones(len(offsets), 5, 2))
    return found


@settings(max_examples=50)
@given(size=st.integers(1, 12), world_size=st.integers(1, 5), step=st.integers(0, 2**33))
def test_a_split_draws_the_rows_of_the_global_mask(size: int, world_size: int, step: int) -> None:
    whole = masks(Drops(), size, range(size), step=step)
    net = Drops()
    parts = [
        masks(net, size, shard_rows(size, (r, world_size)), step=step) for r in range(world_size)
    ]
    assert torch.equal(whole, torch.cat(parts))


class Drops44(nn.Module):
    """Drops of a weight, or of four rows of four features: tensors of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.of_weight = torch.ones(4, 4), False
        globalize(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.of_weight:
            return x @ nn.functional.dropout(self.weight, 0.4)
        return nn.functional.dropout(x, 0.4)

    def mask(self, offsets: range, size: int = 8) -> Tensor:
        where = torch.arange(offsets.start, offsets.stop)
        with within(StepContext(IdentityCollective(), 1, 0, size, where)):
            found: Tensor = self(torch.eye(size, 4)[offsets.start : offsets.stop] + 1)
        return found


def test_a_model_may_draw_something_else_of_the_same_shape() -> None:
    wanted, net = {}, Drops44()
    for net.of_weight in (False, True):
        wanted[net.of_weight] = net.mask(range(8))
    found = Drops44()
    for found.of_weight in (True, False, False, True):
        both = [found.mask(range(4)), found.mask(range(4, 8))]
        assert torch.allclose(torch.cat(both), wanted[found.of_weight], rtol=0, atol=1e-6)
        assert len(found.__dict__["_spartito_randomness"]._known) <= 2


def test_masks_differ_by_step_seed_call_and_pass() -> None:
    size, net = 50, Drops()
    first, again, _ = masks(net, size, range(size)).chunk(3, 1)
    with within(StepContext(IdentityCollective(), 1, 0, size, torch.arange(size))):
        net(torch.ones(size, 5, 2))
        second = net(torch.ones(size, 5, 2)).chunk(3, 1)[0]
    others = [
        again,
        second,
        masks(net, size, range(size), step=1).chunk(3, 1)[0],
        masks(net, size, range(size), step=1 << 32).chunk(3, 1)[0],
        masks(net, size, range(size), seed=2).chunk(3, 1)[0],
        masks(net, size, range(size), seed=-1).chunk(3, 1)[0],
    ]
    for number, other in enumerate(others):
        assert not torch.equal(first, other), number
    assert torch.equal(first, masks(net, size, range(size)).chunk(3, 1)[0])


def test_the_rate_is_right() -> None:
    for p in (0.1, 0.5, 0.9):
        each, _, channels = masks(Drops(p), 4000, range(4000)).chunk(3, 1)
        for mask in (each, channels):
            kept = mask != 0
            assert abs(kept.double().mean().item() - (1 - p)) < 0.01
            assert torch.allclose(mask[kept], torch.tensor(1 / (1 - p)))
        assert torch.equal(channels[..., 0], channels[..., 1])
    assert masks(Drops(1.0), 5, range(5)).eq(0).all()
    assert masks(Drops(0.0), 5, range(5)).eq(1).all()


def test_what_the_user_draws_elsewhere_is_left_alone() -> None:
    net = Drops()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    masks(net, 6, range(6))
    masks(net, 6, range(2))
    assert torch.equal(torch.rand(3), expected)


def test_outside_of_a_step_and_in_evaluation_it_is_torch() -> None:
    enter(None)
    net, twin = Drops(), nn.Dropout(0.4)
    torch.manual_seed(0)
    got = net(torch.ones(20, 5, 2))[:, :5]
    torch.manual_seed(0)
    assert torch.equal(got, twin(torch.ones(20, 5, 2)))
    net.eval()
    assert masks(net, 6, range(6)).eq(1).all()


def test_measuring_changes_no_buffer_and_copies_work() -> None:
    norm = nn.Sequential(nn.BatchNorm1d(5), nn.Dropout(0.5))
    twin = copy.deepcopy(norm)
    globalize(norm)
    copied = copy.deepcopy(norm)
    torch.manual_seed(3)
    x = torch.randn(4, 5, 2)
    for net in (norm, copied):
        with within(StepContext(IdentityCollective(), 1, 0, 8, torch.arange(4))):
            net(x)
    twin(x)
    for one, two, three in zip(norm.buffers(), copied.buffers(), twin.buffers(), strict=True):
        assert torch.equal(one, three)
        assert torch.equal(two, three)


def test_an_error_in_a_model_leaves_nothing_behind() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("of the model")

    net, fails = Drops(), Fails()
    globalize(fails)
    before = masks(net, 6, range(6))
    with pytest.raises(KeyError):
        masks(fails, 6, range(6))
    assert torch.equal(masks(net, 6, range(6)), before)


def test_a_model_that_gets_other_rows_is_refused() -> None:
    with (
        within(StepContext(IdentityCollective(), 1, 0, 8, torch.arange(4))),
        pytest.raises(UserError, match="no input of 4 rows"),
    ):
        Drops()(torch.ones(8, 5, 2))


@pytest.mark.parametrize("compiled", ["model", "layer", "in place", ""])
def test_who_asks_for_it_hears_that_a_compiler_does_nothing(
    compiled: str, caplog: pytest.LogCaptureFixture
) -> None:
    net: Any = nn.Sequential(nn.Linear(3, 2))
    if compiled == "in place":
        net[0].compile(backend="eager")
    elif compiled == "layer":
        net[0] = torch.compile(net[0], backend="eager")
    elif compiled:
        net = torch.compile(net, backend="eager")
    for deterministic in (False, True):
        caplog.clear()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        trainer = sp.Trainer(
            net, optimizer=optimizer, loss=nn.MSELoss(), deterministic=deterministic,
            strategy=sp.OneDeviceStrategy(),
        )  # fmt: skip
        trainer.fit((torch.zeros(4, 3), torch.zeros(4, 2)), epochs=1, verbose=False)
        told = "torch.compile does nothing" in caplog.text
        assert told == (deterministic and bool(compiled))
