"""Synchronized BatchNorm is BatchNorm over the global batch, however its rows are split."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from spartito.collectives.collective import IdentityCollective
from spartito.engine.modules.batchnorm import (
    SyncBatchNorm2d,
    local_batchnorms,
    local_moments,
    merge,
    separate_batchnorm,
    synchronize_batchnorm,
)
from spartito.engine.step_context import within
from spartito.errors import UserError
from tests.collectives.group import run
from tests.engine import jobs, norms

EXACT = 1e-12


def plain(
    batches: list[Tensor], options: dict[str, Any], kind: type[nn.Module] | None = None
) -> dict[str, Tensor]:
    """The same by torch on one device, in one batch."""
    kind = kind or jobs.NORMS[batches[0].dim()]
    norm: Any = kind(batches[0].shape[1], **options).to(batches[0].dtype)
    if norm.affine:
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 2, norm.num_features))
            norm.bias.copy_(torch.linspace(-1, 1, norm.num_features))
    outputs, gradients = [], []
    for batch in batches:
        x = batch.clone().requires_grad_()
        y = norm(x)
        (y * jobs.weights(batch)).sum().backward()
        assert x.grad is not None
        outputs.append(y.detach())
        gradients.append(x.grad)
    result = {"output": torch.cat(outputs), "grad": torch.cat(gradients)}
    if norm.affine:
        result |= {"weight": norm.weight.grad, "bias": norm.bias.grad}
    return result | {name: buffer.clone() for name, buffer in norm.named_buffers()}


def batches(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=dtype) * 3 + 2 for _ in range(3)]


def joined(results: list[dict[str, Tensor]], name: str, cuts: list[int]) -> Tensor:
    """The rows of all ranks, batch by batch."""
    sizes = [stop - start for start, stop in pairwise(cuts)]
    parts = [a[name].view(-1, *a[name].shape[1:]) for a in results]
    turns = max(len(p) // n for p, n in zip(parts, sizes, strict=True) if n)
    rows = []
    for turn in range(turns):
        for part, n in zip(parts, sizes, strict=True):
            rows.append(part[turn * n : (turn + 1) * n])
    return torch.cat(rows)


CASES = [
    ((7, 3), [0, 3, 7], {}),
    ((7, 3), [0, 0, 7], {}),  # nothing on rank 0
    ((5, 3, 4), [0, 1, 5, 5], {"momentum": None}),  # nothing on rank 2
    ((5, 2, 3, 4), [0, 4, 5], {"affine": False}),
    ((6, 2, 3, 2), [0, 2, 3, 6], {"track_running_stats": False, "eps": 1e-3}),
    ((4, 2, 2, 3, 2), [0, 1, 4], {"momentum": 0.3}),
]


@pytest.mark.parametrize(("shape", "cuts", "options"), CASES)
def test_equals_batchnorm_of_the_global_batch(
    shape: tuple[int, ...], cuts: list[int], options: dict[str, Any]
) -> None:
    data = batches(shape)
    expected = plain(data, options)
    results = run(jobs.normalize, len(cuts) - 1, cuts, data, options)
    for name in ("output", "grad"):
        got = joined(results, name, cuts)
        torch.testing.assert_close(got, expected[name], rtol=0, atol=EXACT)
    for name in expected.keys() - {"output", "grad"}:
        for result in results:
            assert torch.equal(result[name], results[0][name])
            torch.testing.assert_close(result[name], expected[name], rtol=0, atol=20 * EXACT)


OWN: list[tuple[type[nn.Module], list[int], dict[str, Any]]] = [
    (norms.BatchNormAct2d, [0, 4, 5], {}),
    (norms.BatchNormAct2d, [0, 0, 2, 5], {"momentum": None}),  # nothing on rank 0
    (norms.BatchNormAct2d, [0, 3, 5], {"track_running_stats": False, "affine": False}),
    (norms.Renamed, [0, 1, 5], {}),
    (norms.Around, [0, 2, 5], {"momentum": 0.3}),
    (norms.BuiltIn, [0, 2, 3, 5], {}),
    (nn.SyncBatchNorm, [0, 2, 5], {}),
    (norms.Instances, [0, 1, 5], {}),
    (norms.Instances, [0, 2, 3, 5], {"momentum": 0.4}),
]


@pytest.mark.parametrize(("kind", "cuts", "options"), OWN)
def test_a_subclass_keeps_its_forward_pass_over_the_global_batch(
    kind: type[nn.Module], cuts: list[int], options: dict[str, Any]
) -> None:
    data = batches((5, 2, 3, 4))
    expected = plain(data, options, kind)
    results = run(jobs.normalize, len(cuts) - 1, cuts, data, options, kind)
    for name in ("output", "grad"):
        got = joined(results, name, cuts)
        torch.testing.assert_close(got, expected[name], rtol=0, atol=EXACT)
    for name in expected.keys() - {"output", "grad"}:
        for result in results:
            assert torch.equal(result[name], results[0][name])
            torch.testing.assert_close(result[name], expected[name], rtol=0, atol=20 * EXACT)


class Three(IdentityCollective):
    """Nobody else has to be there to refuse."""

    world_size = 3


class Alone(IdentityCollective):
    """Two, of whom the other has nothing."""

    world_size = 2

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor, torch.zeros_like(tensor)]


@pytest.mark.parametrize("kind", [norms.Chunked, norms.Ghost, norms.Folded, norms.Split])
def test_a_norm_over_parts_of_the_rows_is_refused_by_name(kind: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Identity(), kind(2).double())
    synchronize_batchnorm(model)
    with (
        within(jobs.context(Three(), 8, range(4))),
        pytest.raises(UserError, match=f"{kind.__name__} '1' normalizes"),
    ):
        model(batches((4, 2, 3, 4))[0])


def test_a_norm_over_parts_of_a_larger_batch_is_refused_whatever_came_before() -> None:
    norm = norms.Ghost(2).double()
    synchronize_batchnorm(norm)
    x = batches((2, 2, 3, 4))[0]
    with within(jobs.context(Alone(), 4, range(2))):
        norm(x)
    for _ in range(2):
        with (
            within(jobs.context(Alone(), 8, range(2))),
            pytest.raises(UserError, match=r"Ghost '' normalizes \(4, 2, 3, 4\)"),
        ):
            norm(x)


def test_norms_get_their_classes_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), norms.Around(3), norms.Instances(3), nn.Identity())
    before, kept = [type(module) for module in model], [dict(vars(module)) for module in model]
    synchronize_batchnorm(model)
    assert [type(module) for module in model][:3] != before[:3]
    separate_batchnorm(model)
    assert [type(module) for module in model] == before
    assert [dict(vars(module)) for module in model] == kept


def test_instances_without_statistics_and_lazy_norms_stay_as_they_are() -> None:
    model = nn.Sequential(nn.InstanceNorm2d(3), nn.LazyBatchNorm2d(), nn.GroupNorm(1, 3))
    before = [type(module) for module in model]
    synchronize_batchnorm(model)
    assert [type(module) for module in model] == before


def test_a_large_mean_loses_no_digits() -> None:
    cuts = [0, 100, 256]
    data = [batch + 1e6 for batch in batches((256, 2, 4, 4), torch.float32)]
    exact = plain([batch.double() for batch in data], {"affine": False})
    (first, second) = run(jobs.normalize, 2, cuts, data, {"affine": False})
    got = joined([first, second], "output", cuts).double()
    # fp32 stores the inputs to 0.06; E[x^2] - E[x]^2 would be off by more than the variance.
    assert (got - exact["output"]).abs().max() < 0.05
    torch.testing.assert_close(
        first["running_var"].double(), exact["running_var"], rtol=2e-2, atol=0
    )


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any),
    st.integers(1, 3),
    st.floats(-1e3, 1e3),
)
def test_moments_merge_in_any_split(sizes: list[int], channels: int, offset: float) -> None:
    generator = torch.Generator().manual_seed(sum(sizes))
    x = torch.randn(sum(sizes), channels, 2, generator=generator, dtype=torch.float64) + offset
    parts = [local_moments(part) for part in x.split(sizes)]

    class Others(IdentityCollective):
        """All parts are at hand: no processes are needed to merge them."""

        def all_gather(self, tensor: Tensor) -> list[Tensor]:
            return [torch.cat([count.view(1), mean, sq]) for count, mean, sq in parts]

    count, mean, squares = merge(Others(), *parts[0])
    assert count.item() == 2 * sum(sizes)
    torch.testing.assert_close(mean, x.mean((0, 2)), rtol=1e-11, atol=1e-11)
    deviations = (x - x.mean((0, 2), keepdim=True)).square().sum((0, 2))
    torch.testing.assert_close(squares, deviations, rtol=1e-9, atol=1e-9)


def test_it_is_plain_batchnorm_where_no_step_runs() -> None:
    x = batches((6, 3, 2, 2))[0]
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()).double()
    twin = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()).double()
    state = list(model.state_dict())
    assert local_batchnorms(model) == [model[0]]
    synchronize_batchnorm(model)
    assert list(model.state_dict()) == state
    assert type(model[0]) is SyncBatchNorm2d
    assert torch.equal(model(x), twin(x))
    with within(jobs.context(IdentityCollective(), 6, range(6))):
        assert torch.equal(model(x), twin(x))
        model.eval()
        twin.eval()
        assert torch.equal(model(x), twin(x))
    with pytest.raises(ValueError, match="expected 4D"):
        model(x[0])


def test_running_statistics_are_averaged() -> None:
    for result in run(jobs.averaged, 3):
        for part, value in zip(result, [1.0, 10.0, 1.0, 10.0], strict=True):
            assert part.tolist() == [value] * len(part)
