"""Gradients over replicas are those of the global batch, exactly weighted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from spartito.collectives.collective import IdentityCollective
from spartito.engine.gradients.gradient_sum import LocalGradients
from tests.collectives.group import run
from tests.engine import jobs

EXACT = 1e-12

UNEVEN = [
    [[0, 4, 11]],
    [[0, 0, 11]],  # nothing on rank 0
    [[0, 3, 6], [6, 7, 11]],  # accumulated, and of unequal sizes
]


def reference(loss: str, clip: float | None) -> tuple[float, list[Tensor]]:
    """By torch alone, in one batch."""
    model = jobs.classifier()
    value = jobs.LOSSES[loss]()(model(jobs.inputs()), jobs.targets(loss)).mean()
    value.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    return value.item(), [p.grad for p in model.parameters() if p.grad is not None]


def check(result: tuple[float, list[Tensor]], loss: str, clip: float | None) -> None:
    value, gradients = reference(loss, clip)
    assert abs(result[0] - value) <= EXACT
    for got, expected in zip(result[1], gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=EXACT)


def test_equal_those_of_the_global_batch() -> None:
    cases: list[jobs.Case] = [
        (cuts, loss, clip, loss != "each")
        for cuts in UNEVEN
        for loss in jobs.LOSSES
        for clip in (None, 0.2)
    ]
    first, second = run(jobs.every_case, 2, cases)
    for (_, loss, clip, _), one, other in zip(cases, first, second, strict=True):
        check(one, loss, clip)
        check(other, loss, clip)
        assert one[0] == other[0]
        assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@pytest.mark.parametrize("loss", jobs.LOSSES)
def test_accumulate_on_one_device_too(loss: str) -> None:
    parts = [[0, 4], [4, 5], [5, 11]]
    check(jobs.weighted(IdentityCollective(), parts, loss, None, False), loss, None)


@pytest.mark.parametrize("norm", [1e-3, 0.2, 1e3])
def test_clip_as_torch_does(norm: float) -> None:
    check(jobs.weighted(IdentityCollective(), [[0, 11]], "mean", norm, False), "mean", norm)


def test_nothing_to_clip() -> None:
    model = jobs.classifier()
    gradients = LocalGradients(torch.optim.SGD(model.parameters(), 0.1))
    gradients.clip(1.0, gradients.norm())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_dtypes_layouts_and_what_nobody_used() -> None:
    base = torch.arange(4 * 3 * 3 * 3.0).view(4, 3, 3, 3)
    for result in run(jobs.layouts, 2):
        conv, half, wide, rare, never, frozen = result
        assert torch.equal(conv, base * 3)  # the weights came to 4, as planned
        assert half.dtype == torch.bfloat16
        assert half.tolist() == [[2.0, 2.0]] * 2
        assert torch.equal(wide, torch.arange(6.0, dtype=torch.float64).view(2, 3) * 3)
        assert rare.tolist() == [1.0, -1.0]
        assert never is None
        assert frozen is None


def test_sparse_gradients_are_refused() -> None:
    for result in run(jobs.sparse, 2):
        assert result.startswith("UserError: a sparse gradient of shape (5, 2)")


def test_weights_go_with_gradients_that_the_user_drops() -> None:
    weight = nn.Parameter(torch.zeros(2))
    gradients = LocalGradients(torch.optim.SGD([weight], 0.1))
    assert gradients.begin(4.0) == 4.0
    weight.grad = torch.ones(2)
    gradients.add(3.0, 4.0)
    assert gradients.begin(2.0) == 4.0  # the divisor of the first batch, until it is cleared
    weight.grad = None
    assert gradients.begin(2.0) == 4.0  # who had no rows does not see what was dropped
    assert (gradients.weight, gradients.loss) == (0.0, 0.0)
    weight.grad = torch.ones(2)
    gradients.add(5.0, 1.0)
    assert gradients.reduce((7.0,)) == (1.0, 5.0, (7.0,))
    assert weight.grad.tolist() == [4.0, 4.0]


def test_what_waits_can_be_divided_by_another_number() -> None:
    weight = nn.Parameter(torch.zeros(2))
    gradients = LocalGradients(torch.optim.SGD([weight], 0.1))
    gradients.begin(4.0)
    weight.grad = torch.ones(2)
    for divisor, expected in ((4.0, 1.0), (8.0, 0.5), (8.0, 0.5)):
        gradients.rescale(divisor)
        assert weight.grad.tolist() == [expected] * 2
    assert gradients.begin(4.0) == 8.0


def test_parameters_are_followed() -> None:
    first, late, left = (nn.Parameter(torch.ones(1), requires_grad=n != 1) for n in range(3))
    left.sum().backward()  # in a training before
    optimizer = torch.optim.SGD([first, late], 0.1)
    gradients = LocalGradients(optimizer)
    assert gradients.parameters == [first]
    late.requires_grad_(True)
    gradients.begin(4.0)
    assert gradients.parameters == [first, late]
    optimizer.add_param_group({"params": [left]})
    gradients.reduce()
    assert gradients.parameters == [first, late, left]
    assert left.grad is None
    optimizer.param_groups[0]["params"] = [late]
    late.requires_grad_(False)
    gradients.begin(4.0)
    assert gradients.parameters == [late, left]
