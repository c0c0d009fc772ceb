"""Every element of a model is copied to its server, and back to where it was."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD

from spartito.errors import UserError
from spartito.ps.client.vector import SpanCopies, Vector
from spartito.ps.protocol.layout import BUFFER, LINE, Span, cut, runs
from spartito.ps.protocol.memory import allocate, dtype_of, flat
from spartito.ps.server.shard import Shard
from tests.ps.models import Odd, models, numbers, optimizer, shaped, sides

SERVERS = st.integers(1, 4)
INF, NAN = float("inf"), float("nan")


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor.to(torch.complex128), other[name].to(torch.complex128))
        for name, tensor in one.items()
    )


@settings(max_examples=70)
@given(models(), SERVERS)
def test_what_is_stored_is_loaded(model: Odd, servers: int) -> None:
    vector = Vector(model, optimizer(model))
    found = sides(vector, servers)
    before = tensors_of(model)
    for _, _, copies in found:
        copies.store()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    assert same(before, {name: torch.zeros_like(t) for name, t in before.items()}) == (
        not any(tensor.to(torch.complex128).any() for tensor in before.values())
    )
    for _, _, copies in found:
        copies.load()
    assert same(before, tensors_of(model))


@settings(max_examples=20)
@given(models(), SERVERS)
def test_memory_that_a_user_puts_in_place_is_read_and_filled(model: Odd, servers: int) -> None:
    vector = Vector(model, optimizer(model))
    found = sides(vector, servers)
    before = tensors_of(model)
    for tensor in vector.tensors:
        old, tensor.data = tensor.data, tensor.data.clone()
        old.zero_()
    for _, _, copies in found:
        copies.store()
    for tensor in vector.tensors:
        tensor.data = torch.zeros_like(tensor)
    for _, _, copies in found:
        copies.load()
    assert same(before, tensors_of(model))


def test_buffers_are_loaded_whatever_has_changed() -> None:
    net = nn.BatchNorm1d(3).double()
    net.running_mean.fill_(5.0)  # type: ignore[union-attr]
    ((_, _, copies),) = sides(Vector(net, SGD(net.parameters(), 0.1)), 1)
    copies.store()
    for tensor in net.state_dict().values():
        tensor.zero_()  # a forward pass changes the buffers
    copies.load(changed=())
    assert net.running_mean.tolist() == [5.0] * 3  # type: ignore[union-attr]
    assert net.weight.tolist() == [0.0] * 3


@settings(max_examples=50)
@given(models(), SERVERS)
def test_the_memory_holds_each_element_once_where_the_layout_says(model: Odd, servers: int) -> None:
    vector = Vector(model, optimizer(model))
    assert {entry.name for entry in vector.layout.entries} == {
        name for name, _ in [*model.named_parameters(), *model.named_buffers()]
    } - {"passing"}
    seen = [torch.zeros(tensor.numel(), dtype=torch.int64) for tensor in vector.tensors]
    for span, memory, copies in sides(vector, servers):
        copies.store()
        for run in runs(vector.layout, span):
            for part in run.parts:
                at = part.offset - span.start
                kind = dtype_of(run.dtype)
                held = memory[at : at + (part.end - part.begin) * kind.itemsize].view(kind)
                own = flat(vector.tensors[part.entry].detach())[part.begin : part.end]
                assert torch.equal(held.to(torch.complex128), own.to(torch.complex128))
                seen[part.entry][part.begin : part.end] += 1
    assert all(bool((counts == 1).all()) for counts in seen)


@settings(max_examples=70)
@given(models(), SERVERS, st.data())
def test_gradients_lie_where_their_parameters_do(
    model: Odd, servers: int, data: st.DataObject
) -> None:
    stepped = optimizer(model)
    vector = Vector(model, stepped)
    groups = {entry.name: entry.group for entry in vector.layout.entries}
    named = dict(model.named_parameters())
    expected: dict[str, Tensor] = {}
    missing = set()
    for number, (name, parameter) in enumerate(named.items()):
        known = groups[name] >= 0
        if parameter.requires_grad and data.draw(st.booleans()):
            dtype = str(parameter.dtype).removeprefix("torch.")
            grad = numbers(tuple(parameter.shape), dtype, model.dice)
            form = data.draw(st.sampled_from(["rows", "columns", "last"]))
            parameter.grad = shaped(grad, form)
            if known:
                expected[name] = grad
        elif known and parameter.numel():
            missing.add(number)
    absent: set[int] = set()
    found = sides(vector, servers)
    for span, memory, copies in found:
        memory.fill_(255)  # of the last push
        absent |= set(copies.store_gradients())
        for run in runs(vector.layout, span):
            if not run.learns:
                memory[run.start - span.start : run.stop - span.start] = 0
    assert {vector.layout.entries[entry].name for entry in absent} == {
        list(named)[number] for number in missing
    }
    with torch.no_grad():
        for parameter in named.values():
            parameter.fill_(7)
    for _, _, copies in found:
        copies.load()
    for name, parameter in named.items():
        if groups[name] >= 0:
            grad = expected.get(name, torch.zeros_like(parameter.detach()))
            assert torch.equal(parameter.detach(), grad), name


@settings(max_examples=50)
@given(models(), SERVERS)
def test_changes_of_buffers_bring_a_server_to_the_new_values(model: Odd, servers: int) -> None:
    vector = Vector(model, optimizer(model))
    pulled, pushed = sides(vector, servers), sides(vector, servers)
    held = []
    for span, memory, copies in pulled:
        copies.store()
        shard = Shard(vector.layout, span, deepcopy(optimizer(model)), vector.tensors)
        shard.values.copy_(memory)
        held.append(shard)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name in dict(model.named_buffers()):
                dtype = str(tensor.dtype).removeprefix("torch.")
                tensor.copy_(numbers(tuple(tensor.shape), dtype, model.dice))
    after = tensors_of(model)
    for shard, (_, memory, copies), (_, _, old) in zip(held, pushed, pulled, strict=True):
        absent = copies.store_gradients() + copies.store_changes(old)
        shard.update(memory, absent)
    for shard, (_, memory, copies) in zip(held, pulled, strict=True):
        memory.copy_(shard.values)
        copies.load()
    assert same(after, tensors_of(model))


class Masked(nn.Module):
    mask: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(40))
        self.register_buffer("mask", torch.tensor([0.0, -INF, NAN, INF]))
        self.register_buffer("mean", torch.zeros(4))


def test_an_infinity_that_stays_is_no_change() -> None:
    model = Masked()
    vector = Vector(model, SGD([model.weight], lr=1.0))
    span = Span(0, vector.layout.size)
    old, new = allocate(span), allocate(span)
    before, after = SpanCopies(vector, span, old), SpanCopies(vector, span, new)
    before.store()
    model.weight.grad = torch.ones(40)
    model.mean += 2
    after.store_gradients()
    after.store_changes(before)
    assert after.norm() < INF
    shard = Shard(vector.layout, span, SGD([model.weight], lr=1.0), vector.tensors)
    shard.values.copy_(old)
    shard.update(new)
    old.copy_(shard.values)
    before.load()
    assert str(model.mask.tolist()) == "[0.0, -inf, nan, inf]"
    assert model.mean.tolist() == [2.0] * 4
    assert model.weight.tolist() == [0.0] * 40
    model.mask[0] = INF  # this one is new
    after.store_changes(before)
    assert after.norm() == INF


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "complex64"])
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_one_bad_element_is_found(dtype: str, value: float) -> None:
    parameter = nn.Parameter(torch.zeros(300, dtype=dtype_of(dtype)))
    model = nn.ParameterDict({"weight": parameter})
    vector = Vector(model, SGD([parameter], lr=1.0))
    for target in (0, 150, 299):
        parameter.grad = torch.ones(300, dtype=parameter.dtype)
        parameter.grad[target] = value
        found = []
        for _, _, copies in sides(vector, 3):
            copies.store_gradients()
            found.append(copies.norm() < INF)
        assert found.count(False) == 1
        parameter.grad.nan_to_num_(1.0, 1.0, 1.0) if not parameter.is_complex() else (
            parameter.grad.fill_(1)
        )
        for _, _, copies in sides(vector, 3):
            copies.store_gradients()
            assert copies.norm() < INF


def test_a_sum_that_overflows_is_finite_all_the_same() -> None:
    parameter = nn.Parameter(torch.zeros(100))
    model = nn.ParameterDict({"weight": parameter})
    vector = Vector(model, SGD([parameter], lr=1.0))
    parameter.grad = torch.full((100,), 3e38)
    ((_, _, copies),) = sides(vector, 1)
    copies.store_gradients()
    assert copies.norm() < INF


def test_one_infinity_against_another_is_found() -> None:
    parameter = nn.Parameter(torch.zeros(100))
    vector = Vector(nn.ParameterDict({"weight": parameter}), SGD([parameter], lr=1.0))
    parameter.grad = torch.zeros(100)
    parameter.grad[3], parameter.grad[4] = INF, -INF
    ((_, _, copies),) = sides(vector, 1)
    copies.store_gradients()
    assert copies.norm() == INF


@given(st.integers(0, 500), st.integers(1, 500))
def test_memory_is_zeroed_and_lies_as_its_span_does(start: int, size: int) -> None:
    memory = allocate(Span(start, start + size))
    assert memory.shape == (size,)
    assert not memory.any()
    assert memory.data_ptr() % LINE == start % LINE


@given(st.lists(st.integers(0, 5), max_size=4), st.sampled_from(["rows", "columns", "last"]))
def test_flat_is_the_memory_itself(shape: list[int], form: str) -> None:
    tensor = shaped(torch.arange(torch.Size(shape).numel()).view(shape), form)
    found = flat(tensor)
    assert found.shape == (tensor.numel(),)
    assert sorted(found.tolist()) == list(range(tensor.numel()))
    found.fill_(-1)
    assert bool((tensor == -1).all())


def test_what_is_not_dense_is_refused() -> None:
    for tensor in (torch.zeros(4, 4)[:, ::2], torch.zeros(1, 3).expand(4, 3)):
        with pytest.raises(UserError, match="dense"):
            flat(tensor)
    parameter = nn.Parameter(torch.zeros(8, 8)[:, ::2])
    vector = Vector(nn.ParameterDict({"weight": parameter}), SGD([parameter], lr=1.0))
    for spans in (cut(vector.layout, 1, 1, False), cut(vector.layout, 2, 1, False)):
        with pytest.raises(UserError, match=r"\(8, 4\)"):
            SpanCopies(vector, spans[0], allocate(spans[0]))


def test_tied_parameters_and_passing_buffers() -> None:
    model = Odd([("float32", (4,), "rows", "tied"), ("int64", (), "rows", "buffer")], 0)
    vector = Vector(model, optimizer(model))
    assert [entry.name for entry in vector.layout.entries] == ["t0", "t1"]
    assert [entry.group for entry in vector.layout.entries] == [0, BUFFER]
