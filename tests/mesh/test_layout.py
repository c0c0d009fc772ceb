"""Rules, names of dims, and what is refused before anything is cut. No process is started."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from spartito.errors import UserError
from spartito.mesh.describe import describe, first_of
from spartito.mesh.layout import DEFAULT, Dim, Layout, read_rules
from spartito.mesh.names import name_dims
from spartito.mesh.placing import SpecCut, plan
from spartito.mesh.spec import Spec, spec
from spartito.models import GPT, CatsVsDogs, MnistMLP

NAMES = ("heads", "hidden", "channels", "vocab", "features", None)
TWO = Layout(DEFAULT, {"data": 2, "model": 2})


def axes_of(model: nn.Module, layout: Layout = TWO, **options: Any) -> dict[str, tuple[Any, ...]]:
    """How each tensor that is cut lies."""
    planned = plan(model, layout, **options)
    return {path: one.spec.dims for path, one in planned.items() if not one.spec.is_replicated}


@given(
    rules=st.lists(st.tuples(st.sampled_from(NAMES[:-1]), st.sampled_from("xyz")), max_size=8),
    sizes=st.tuples(*[st.integers(1, 4)] * 3),
    dims=st.lists(
        st.tuples(st.sampled_from(NAMES), st.integers(0, 4), st.integers(1, 24)), max_size=4
    ),
)
def test_the_first_rule_whose_axis_is_free_wins(
    rules: list[tuple[str, str]], sizes: tuple[int, ...], dims: list[tuple[Any, int, int]]
) -> None:
    used = {axis for _, axis in rules}
    axes = {axis: n for axis, n in zip("xyz", sizes, strict=True) if axis in used}
    layout = Layout(tuple(rules), axes)
    named = [Dim(name, units=units) for name, units, _ in dims]
    found = layout.lay(named, [size for *_, size in dims])
    taken = [axis for axis in found.axes if axis]
    assert len(taken) == len(set(taken))
    for number, (dim, (_, _, size), axis) in enumerate(zip(named, dims, found.axes, strict=True)):
        before = found.axes[:number]
        wanted = [a for name, a in rules if name == dim.name and axes[a] > 1 and a not in before]
        fitting = [a for a in wanted if dim.divides(size, axes[a])]
        assert axis == (fitting[0] if fitting else None)
        assert (number in found.uneven) == (bool(wanted) and not fitting)


def test_linear_layers_are_cut_by_columns_then_by_rows() -> None:
    assert axes_of(MnistMLP()) == {
        "hidden1.weight": ("model", None),
        "hidden1.bias": ("model",),
        "hidden2.weight": (None, "model"),
        "logits.weight": ("model", None),
        "logits.bias": ("model",),
    }


@pytest.mark.parametrize("packed", [False, True])
def test_a_transformer_is_cut_by_heads_and_its_vocabulary_once(packed: bool) -> None:
    model = GPT(12, context=8, layers=1, heads=4, width=16, packed=packed)
    found = plan(model, TWO)
    assert "head.weight" not in found  # tied
    assert found["embedding.weight"].spec.dims == ("model", None)
    assert found["blocks.0.attention.out.weight"].spec.dims == (None, "model")
    assert found["blocks.0.attention.out.bias"].spec.is_replicated
    assert found["blocks.0.up.weight"].spec.dims == ("model", None)
    assert found["blocks.0.down.weight"].spec.dims == (None, "model")
    if packed:
        qkv = found["blocks.0.attention.qkv.weight"].spec
        assert (qkv.dims, qkv.blocks_of(0)) == (("model", None), (16, 16, 16))
    else:
        for name in ("query", "key", "value"):
            assert found[f"blocks.0.attention.{name}.weight"].spec.dims == ("model", None)


def test_convolutions_are_cut_by_channels_with_their_statistics() -> None:
    found = axes_of(CatsVsDogs())
    assert found["entry1.weight"] == ("model", None, None, None)
    assert found["entry1_norm.running_var"] == ("model",)
    assert found["blocks.0.separable1.depthwise.weight"] == ("model", None, None, None)
    assert found["head.weight"] == (None, "model")
    assert "head.bias" not in found
    grouped = nn.ConvTranspose1d(6, 8, 3, groups=2)
    assert axes_of(grouped)["weight"] == ("model", None, None)
    assert axes_of(nn.ConvTranspose1d(6, 8, 3))["weight"] == (None, "model", None)
    assert axes_of(nn.GroupNorm(3, 12)) == {}  # three groups stay whole


def test_packed_heads_of_two_kinds_are_cut_each_by_itself() -> None:
    class Attention(nn.Module):
        num_heads, num_key_value_heads = 4, 2

        def __init__(self) -> None:
            super().__init__()
            self.qkv_proj = nn.Linear(8, 4 * 2 + 2 * 2 * 2)
            self.o_proj = nn.Linear(8, 8)

    found = plan(Attention(), TWO)
    assert found["qkv_proj.weight"].spec == spec(("model", None), (), ((8, 4, 4), ()))
    assert found["o_proj.weight"].spec.dims == (None, "model")
    four = plan(Attention(), Layout((("heads", "model"),), {"model": 4}))
    assert all(one.spec.is_replicated for one in four.values())  # two heads for four tasks


def test_patterns_win_over_types() -> None:
    names = {"*.weight": ("features", None), "0.weight": (None, "hidden"), "0.bias": (None,)}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert axes_of(model, names=names) == {"0.weight": (None, "model")}
    assert name_dims(model, {"0.weight": ("2*heads", None)})["0.weight"][0].parts == (1, 1)


def test_a_cut_that_costs_more_than_it_saves_is_named() -> None:
    model = nn.Sequential(nn.Embedding(4, 64), nn.Linear(64, 2048), nn.Linear(2048, 64))
    given = torch.zeros(8, 256, dtype=torch.int64)
    found = describe(model, plan(model, TWO), TWO, given)
    assert [text.split(":")[0] for text in found.warnings] == ["0"]
    assert "its cut saves 512 bytes of parameters" in found.warnings[0]
    whole = {"0.weight": (None, None)}
    without = describe(model, plan(model, TWO, whole), TWO, given)
    assert not without.warnings
    assert sum(cost.nbytes for cost in without.costs) < sum(cost.nbytes for cost in found.costs)
    assert all(one.numel() for one in model.parameters())  # it was not changed
    assert "collectives of one step, for an input of (8, 256)" in str(found)
    assert found.nbytes < found.whole_nbytes


def test_the_first_task_of_a_model_computes_its_own_shards() -> None:
    first, second = nn.Linear(6, 8).double(), nn.Linear(8, 4).double()
    model, x = nn.Sequential(first, nn.ReLU(), second), torch.randn(5, 6, dtype=torch.float64)
    layout = Layout(DEFAULT, {"data": 1, "model": 2})
    found = first_of(model, plan(model, layout), layout)
    hidden = torch.relu(x @ first.weight[:4].T + first.bias[:4])
    expected = hidden @ second.weight[:, :4].T + second.bias
    torch.testing.assert_close(found(x), expected, rtol=0, atol=1e-14)
    assert [one.numel() for one in found.parameters()] == [24, 4, 16, 4]
    assert [one.numel() for one in model.parameters()] == [48, 8, 32, 4]


def test_an_axis_of_ours_may_be_unused_where_it_divides_nothing() -> None:
    assert Layout((("hidden", "model"),), {"data": 1, "model": 2}).batch_axis is None


ATTENTION = nn.MultiheadAttention(6, 3)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: Layout((("hidden", "modell"),), {"model": 2}), "'hidden' on the axis 'modell'"),
        (lambda: Layout((), {"model": 2}), "no rule is about the axis 'model'.*\n  Name a dim"),
        (lambda: Layout(DEFAULT[:1], {"data": 2, "modle": 2}), "Did you mean 'model'. Else name"),
        (lambda: Layout(DEFAULT, {"data": 2, "model": 2, "modle": 1}), "'modle' of size 1"),
        (lambda: Layout((("hidden", "rows"),), {"rows": 2, "row": 1}), "Did you mean 'rows'"),
        (lambda: Layout(DEFAULT[:1], {"data": 2, "xyz": 2}), "axis 'xyz'.*\n  Name a dim for it"),
        (lambda: Layout((*DEFAULT, ("vocab", "data")), {"data": 2, "model": 2}), "'sharded'"),
        (lambda: read_rules(["hidden"]), "'hidden' is no rule"),
        (lambda: read_rules({"hidden": 3}), "is no rule"),
        (lambda: Dim.read("*heads"), "is no name of a dim"),
        (
            lambda: plan(MnistMLP(), Layout((("hiden", "model"),), {"model": 2})),
            "has a dim 'hiden'\n  Did you mean 'hidden'.* The model has .*hidden .5 tensors",
        ),
        (
            lambda: plan(MnistMLP(), TWO, {"logit.*": ("hidden",)}),
            r"names: 'logit.\*' fits no parameter\n  Did you mean 'logits",
        ),
        (
            lambda: plan(MnistMLP(), TWO, {"logits.weight": ("hidden",)}),
            r"'logits.weight' gives .* of shape \(10, 256\)",
        ),
        (
            lambda: plan(MnistMLP(), TWO, {"logits.weight": ("hidden", "vocab")}),
            "the dims 'hidden' and 'vocab' of one tensor are both on the axis 'model'",
        ),
        (
            lambda: plan(MnistMLP(), Layout(DEFAULT[1:], {"model": 4}), strict=True),
            "logits.weight: 10 hidden do not divide among model=4",
        ),
        (
            lambda: plan(ATTENTION, TWO, strict=True),
            "in_proj_weight: 3 heads do not divide among model=2",
        ),
    ],
)
def test_what_cannot_be_is_refused(build: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        build()


@given(
    count=st.integers(1, 3),
    each=st.integers(1, 3),
    blocks=st.lists(st.integers(1, 3), min_size=0, max_size=3),
    other=st.integers(0, 3),
)
def test_the_boxes_of_all_tasks_are_the_whole_tensor(
    count: int, each: int, blocks: list[int], other: int
) -> None:
    sizes = {"x": count, "y": 2}
    parts = tuple(count * n for n in blocks)
    shape = (sum(parts) or count * each, other * 2)
    how: Spec = spec(("x", "y"), (), (parts, ())) if parts else spec(("x", "y"))
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    seen = torch.full(shape, -1)
    for x in range(count):
        for y in range(2):
            cut = SpecCut(shape, how, sizes, {"x": x, "y": y})
            rows = [
                r
                for block in whole.split(list(parts or (shape[0],)))
                for r in block.chunk(count)[x]
            ]
            local = torch.stack(rows).chunk(2, 1)[y] if shape[1] else whole.new_empty(cut.local)
            assert tuple(local.shape) == cut.local
            for box, part in cut.parts(local):
                there = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                assert (seen[there] == -1).all()
                seen[there] = part
    assert torch.equal(seen, whole)
