"""Masks are drawn for the global batch: every split sees its own rows of the same ones."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from spartito.collectives.collective import IdentityCollective
from spartito.data.order import share
from spartito.engine.context import StepContext, current, enter, within
from spartito.engine.dropout import GlobalDropout, globalize_dropout

ALONE = IdentityCollective()


def model(p: float = 0.4) -> nn.Sequential:
    made = nn.Sequential(nn.Dropout(p), nn.Dropout(p))
    globalize_dropout(made)
    return made


def masks(
    net: nn.Sequential, size: int, places: range, *, seed: int = 1, step: int = 0
) -> tuple[Tensor, Tensor]:
    """What the two modules let through of ones, twice the first one."""
    ones = torch.ones(len(places), 5, 2)
    where = torch.arange(places.start, places.stop)
    with within(StepContext(ALONE, seed, step, size, where)):
        return torch.cat([net[0](ones), net[0](ones)], 1), net[1](ones)


@settings(max_examples=50)
@given(size=st.integers(1, 12), world_size=st.integers(1, 5), step=st.integers(0, 2**33))
def test_a_split_draws_the_rows_of_the_global_mask(size: int, world_size: int, step: int) -> None:
    whole = masks(model(), size, range(size), step=step)
    parts = [masks(model(), size, share(size, r, world_size), step=step) for r in range(world_size)]
    for mask, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(mask, torch.cat(pieces))


def test_masks_differ_by_step_seed_module_and_call() -> None:
    size = 50
    twice, second = masks(model(), size, range(size))
    first, again = twice.chunk(2, 1)
    others = [
        again,
        second,
        masks(model(), size, range(size), step=1)[0].chunk(2, 1)[0],
        masks(model(), size, range(size), step=1 << 32)[0].chunk(2, 1)[0],
        masks(model(), size, range(size), seed=2)[0].chunk(2, 1)[0],
    ]
    for number, other in enumerate(others):
        assert not torch.equal(first, other), number
    assert torch.equal(first, masks(model(), size, range(size))[0].chunk(2, 1)[0])


def test_the_rate_is_right() -> None:
    for p in (0.1, 0.5, 0.9):
        mask, _ = masks(model(p), 4000, range(4000))
        kept = mask != 0
        assert abs(kept.double().mean().item() - (1 - p)) < 0.01
        assert torch.allclose(mask[kept], torch.tensor(1 / (1 - p)))
    assert masks(model(1.0), 5, range(5))[0].eq(0).all()
    assert masks(model(0.0), 5, range(5))[0].eq(1).all()


def test_gradients_pass_where_values_do() -> None:
    net = model()
    x = torch.ones(6, 5, requires_grad=True)
    with within(StepContext(ALONE, 1, 0, 6, torch.arange(6))):
        y = net[0](x)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())


def test_names_stay_and_other_dropouts_too() -> None:
    net = nn.Sequential(nn.Dropout(0.3), nn.Dropout2d(0.3), nn.Sequential(nn.Dropout(0.1)))
    globalize_dropout(net)
    assert type(net[0]) is GlobalDropout
    assert isinstance(net[0], nn.Dropout)
    assert type(net[1]) is nn.Dropout2d
    assert net[0].number != net[2][0].number  # type: ignore[index]
    net.eval()
    x = torch.randn(4, 3, 2, 2)
    with within(StepContext(ALONE, 1, 0, 4, torch.arange(4))):
        assert torch.equal(net(x), x)


def test_outside_of_a_step_it_is_plain_dropout() -> None:
    enter(None)
    net = model()
    torch.manual_seed(0)
    got = net[0](torch.ones(20, 3))
    torch.manual_seed(0)
    assert torch.equal(got, nn.Dropout(0.4)(torch.ones(20, 3)))


def test_a_context_ends_with_its_block() -> None:
    context = StepContext(ALONE, 1, 0, 1, torch.arange(1))
    enter(None)
    with within(context):
        assert current() is context
    assert current() is None
