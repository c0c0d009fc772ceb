from __future__ import annotations

import json
import math
import os
import stat
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from spartito.errors import UserError
from spartito.storage.tensors import load_tensors, pack_state, save_tensors, unpack_state


def same(a: Any, b: Any) -> bool:
    """Equal in kind and value, NaN and tensors too."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.cpu(), b.cpu())
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    if isinstance(a, dict):
        return [(type(k), k) for k in a] == [(type(k), k) for k in b] and all(
            same(a[k], b[k]) for k in a
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


ARRAYS = {
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "float64": torch.tensor([math.nan, math.inf, -0.0], dtype=torch.float64),
    "integers": torch.tensor([2**62, -1]),
    "bools": torch.tensor([True, False]),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
    "conjugate": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
    "needs_grad": torch.ones(2, requires_grad=True),
}


def test_every_kind_of_tensor_comes_back(tmp_path: Path) -> None:
    save_tensors(ARRAYS, tmp_path / "a.safetensors")
    back = load_tensors(tmp_path / "a.safetensors")
    assert set(back) == set(ARRAYS)
    for name, tensor in ARRAYS.items():
        assert back[name].dtype == tensor.dtype, name
        assert back[name].shape == tensor.shape, name
        torch.testing.assert_close(back[name], tensor.detach(), rtol=0, atol=0, equal_nan=True)


def test_other_programs_can_read_the_file(tmp_path: Path) -> None:
    save_tensors(ARRAYS, tmp_path / "a.safetensors")
    assert set(load_file(tmp_path / "a.safetensors")) == set(ARRAYS)


def test_tied_weights_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(100, 10))
    tensors = {"encoder": weight, "decoder": weight, "detached": weight.detach()}
    save_tensors(tensors, tmp_path / "tied.safetensors")
    assert (tmp_path / "tied.safetensors").stat().st_size < 2 * 4000
    back = load_tensors(tmp_path / "tied.safetensors")
    assert back["encoder"] is back["decoder"] is back["detached"]
    assert torch.equal(back["encoder"], weight.detach())


def test_views_of_one_storage_are_not_taken_for_ties(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    tensors = {
        "all": flat,
        "head": flat[:6],
        "tail": flat[6:],
        "square": flat[:9].view(3, 3),
        "turned": flat[:9].view(3, 3).t(),
        "other_type": flat.view(torch.int32),
        "no_rows": flat[:0],
        "no_rows_either": flat[:0].view(0, 3),
    }
    save_tensors(tensors, tmp_path / "views.safetensors")
    back = load_tensors(tmp_path / "views.safetensors")
    assert all(same(back[name], tensor.contiguous()) for name, tensor in tensors.items())
    assert set(back) == set(tensors)


def test_no_tensors_at_all(tmp_path: Path) -> None:
    save_tensors({}, tmp_path / "none.safetensors")
    assert load_tensors(tmp_path / "none.safetensors") == {}


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.eye(2).to_sparse(), "weight is a sparse_coo tensor"),
        (torch.empty(2, device="meta"), "weight is a meta tensor"),
        (torch.ones(2, dtype=torch.complex128), r"weight is of torch\.complex128"),
    ],
)
def test_what_the_format_lacks_is_named(tmp_path: Path, tensor: torch.Tensor, why: str) -> None:
    with pytest.raises(UserError, match=why):
        save_tensors({"weight": tensor}, tmp_path / "x.safetensors")


def test_the_name_of_the_header_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="__metadata__"):
        save_tensors({"__metadata__": torch.ones(1)}, tmp_path / "x.safetensors")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no/x\.safetensors cannot be written"):
        save_tensors({"a": torch.ones(1)}, tmp_path / "no" / "x.safetensors")


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.safetensors does not exist"):
        load_tensors(tmp_path / "absent.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"not a header at all")
    with pytest.raises(UserError, match=r"bad\.safetensors is not a safetensors file"):
        load_tensors(tmp_path / "bad.safetensors")


KEYS = st.text() | st.integers() | st.booleans() | st.none() | st.sampled_from(["$tensor", "$dict"])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.lists(st.floats(width=32, allow_nan=False), max_size=3).map(torch.tensor)
    | st.integers(-9, 9).map(lambda v: torch.tensor(v, dtype=torch.bfloat16))
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(TREES)
def test_any_state_comes_back_through_json(state: Any) -> None:
    tree, tensors = pack_state(state)
    text = json.dumps(tree, allow_nan=False)
    assert same(unpack_state(json.loads(text), tensors), state)


@given(TREES)
def test_the_names_of_tensors_can_be_stored(
    tmp_path_factory: pytest.TempPathFactory, state: Any
) -> None:
    _, tensors = pack_state(state)
    file = tmp_path_factory.getbasetemp() / "any.safetensors"
    save_tensors(tensors, file)
    back = load_tensors(file)
    assert back.keys() == tensors.keys()
    assert all(same(back[name], tensor) for name, tensor in tensors.items())


def test_the_state_of_an_optimizer_and_a_schedule_loads_again() -> None:
    def make() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
        optimizer = torch.optim.AdamW(weights, lr=0.1)
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])

    optimizer, schedule = make()
    for weight in optimizer.param_groups[0]["params"]:
        weight.grad = torch.ones(3)
    optimizer.step()
    schedule.step()
    tree, tensors = pack_state([optimizer.state_dict(), schedule.state_dict()])
    assert "0.state.1.exp_avg" in tensors
    back = unpack_state(json.loads(json.dumps(tree)), tensors)
    other, other_schedule = make()
    other.load_state_dict(back[0])
    other_schedule.load_state_dict(back[1])
    assert other_schedule.get_last_lr() == pytest.approx([0.01])
    assert same(other.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_flat_state_keeps_the_names_of_its_tensors() -> None:
    names = ["layers.0.weight", "layers.0.bias", "scale"]
    _, tensors = pack_state({name: torch.ones(1) for name in names})
    assert list(tensors) == names


def test_two_paths_that_read_alike_keep_apart() -> None:
    state = {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), "__metadata__": torch.ones(2)}
    tree, tensors = pack_state(state)
    assert set(tensors) == {"a.b", "a.b#2", "__metadata__#2"}
    assert same(unpack_state(tree, tensors), state)


def test_subclasses_come_back_as_what_they_are() -> None:
    tree, tensors = pack_state(OrderedDict(size=torch.Size([2, 3])))
    assert same(unpack_state(tree, tensors), {"size": (2, 3)})


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"a": [1, {"b": {1, 2}}]}, r"a\.1\.b is a set"),
        (b"bytes", "The state is a bytes"),
        ({"groups": {(1, 2): 3}}, r"groups has the key \(1, 2\) of type tuple"),
        ({"schedule": {"fn": print}}, r"schedule\.fn is a builtin_function_or_method"),
    ],
)
def test_what_cannot_be_saved_is_named_by_its_path(state: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        pack_state(state)


@pytest.mark.parametrize("tree", [{"$tensor": "gone"}, {"$float": "much"}, {"$dict": [1]}])
def test_a_tree_that_does_not_fit_is_refused(tree: Any) -> None:
    with pytest.raises(UserError, match="does not fit together"):
        unpack_state(tree, {})


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_who_may_read_a_file_is_what_the_umask_says(tmp_path: Path, mask: int, mode: int) -> None:
    file = tmp_path / "a.safetensors"
    before = os.umask(mask)
    try:
        save_tensors(ARRAYS, file)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == mode
    assert list(tmp_path.iterdir()) == [file]
