"""A model that looks at its input goes several ways, each with a program of its own."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from spartito.pipeline.branches import goes
from spartito.pipeline.model import PipedModel
from spartito.pipeline.program import record
from tests.pipeline.jobs import Looks

FULL = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize(
    ("tokens", "same"),
    [
        (FULL, True),
        (FULL.flip(1), True),  # other numbers, which no branch hangs on
        (torch.tensor([[1, 2, 3], [4, 5, 0]]), False),  # a mask with a 0
        (torch.tensor([[1, 2, 0], [4, 5, 0]]), False),  # and shorter
    ],
)
def test_a_pass_goes_the_way_of_one_that_saw_the_same(tokens: Tensor, same: bool) -> None:
    net = Looks(4)
    program = record(net, lambda: net(FULL))
    assert program.looks
    assert goes(program, net, lambda: net(tokens)) is same


def test_a_number_that_is_only_computed_with_is_no_branch() -> None:
    net = nn.Linear(3, 3)

    def call(scale: float) -> Tensor:
        output: Tensor = net(torch.ones(2, 3)) * torch.tensor(scale).item()
        return output

    program = record(net, lambda: call(2.0))
    assert goes(program, net, lambda: call(3.0))
    assert goes(program, net, lambda: call(float("nan")))


def test_one_way_more_or_less_at_its_end_is_another() -> None:
    net = nn.Linear(3, 3)

    def call(positive: bool) -> Tensor:
        output: Tensor = net(torch.ones(2, 3))
        return output.relu() if torch.tensor(positive) else output

    calls = [partial(call, positive) for positive in (False, True)]
    short, long = (record(net, each) for each in calls)
    assert [goes(short, net, each) for each in calls] == [True, False]
    assert [goes(long, net, each) for each in calls] == [False, True]


def test_one_that_does_not_look_is_not_followed() -> None:
    net = nn.Linear(3, 3)
    program = record(net, lambda: net(torch.ones(2, 3)))
    assert goes(program, net, lambda: pytest.fail("a pass"))


class Remembers(nn.Module):
    """It replaces a buffer in each pass, and looks."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("last", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.last = x[0]
        output: Tensor = self.layer(x) if x.sum() > 0 else x
        return output


def test_the_model_stays_as_it_was() -> None:
    net = Remembers()
    before, state = net.last, torch.get_rng_state()
    up, down = (partial(net, torch.full((2, 3), value)) for value in (1.0, -1.0))
    program = record(net, up)
    assert goes(program, net, up)
    assert not goes(program, net, down)
    assert net.last is before
    assert torch.equal(before, torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


def test_each_way_is_recorded_once() -> None:
    net = Looks(4)
    piped = PipedModel(net, 1, [0], torch.device("cpu"))
    padded = FULL.clone()
    padded[0, 2] = 0
    given = [FULL, padded, FULL, FULL.flip(0), padded]
    cuts = [piped.cut(partial(net, x), x) for x in given]
    assert cuts[0] is cuts[2] is cuts[3]
    assert cuts[1] is cuts[4] is not cuts[0]
