"""A hook on a gradient is one of a part of it; what is then another sum is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartito.engine.gradients.gradient_hooks import GradientHooks
from spartito.errors import UserError

NOISE = torch.Generator().manual_seed(1)


def halve(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


def clamp(parameter: Any) -> None:
    parameter.grad.clamp_(-5, 5)


def step(parameter: Any) -> None:
    parameter.grad.add_(parameter, alpha=0.1)


def run(hook: Any, after: bool = False, repeats: bool = False) -> nn.Linear:
    """A backward pass of a layer that has the hook."""
    torch.manual_seed(1)
    net = nn.Linear(3, 2)
    register: Any = nn.Parameter.register_post_accumulate_grad_hook if after else None
    (register or Tensor.register_hook)(net.weight, hook)
    before = [*(net.weight._backward_hooks or {}).values()]
    with GradientHooks().watching(lambda: {id(net.weight): "weight"}, [*net.parameters()], repeats):
        net(torch.randn(4, 3)).square().sum().backward()
    assert [*(net.weight._backward_hooks or {}).values()] == before
    return net


def refused(is_refused: bool) -> AbstractContextManager[Any]:
    said = "a hook on the gradient of 'weight' that is no fixed factor"
    return pytest.raises(UserError, match=said) if is_refused else nullcontext()


@pytest.mark.parametrize(
    ("hook", "is_refused"),
    [
        (lambda g: g * 0.3, False),
        (lambda g: g * torch.tensor([1.0, 0.0, 1.0]), False),
        (lambda g: torch.nan_to_num(g), False),
        (lambda g: g.flip(0), False),
        (lambda g: g.clamp(-5, 5), True),
        (lambda g: g / g.norm(), True),
        (lambda g: g + 0.1, True),
        (lambda g: g.sign(), True),
        (lambda g: g.abs(), True),
        (lambda g: g + torch.randn(g.shape, generator=NOISE), True),
    ],
)
def test_what_is_no_factor_is_refused(hook: Callable[[Tensor], Tensor], is_refused: bool) -> None:
    with refused(is_refused):
        run(hook)


@pytest.mark.parametrize(
    ("hook", "repeats", "is_refused"),
    [(halve, False, False), (halve, True, True), (clamp, False, True), (step, False, True)],
)
def test_so_are_hooks_on_what_has_been_added_up(hook: Any, repeats: bool, is_refused: bool) -> None:
    with refused(is_refused):
        run(hook, after=True, repeats=repeats)


def test_who_only_looks_is_called_once() -> None:
    seen: list[Tensor] = []
    net = run(lambda g: seen.append(g.clone()))
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], net.weight.grad)


def test_each_is_looked_at_once() -> None:
    net, hooks, calls = nn.Linear(2, 1), GradientHooks(), list[int]()
    net.weight.register_hook(lambda g: calls.append(1) or g * 2)  # type: ignore[func-returns-value]
    for _ in range(2):
        with hooks.watching(dict, [*net.parameters()]):
            net(torch.ones(1, 2)).sum().backward()
    assert len(calls) == 2 + 3
