"""Any cutting of a tensor into boxes, in any files, is read as any other one, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from spartito.checkpoint.cuts import Box, SpanCut, boxes_of_span, gap
from spartito.checkpoint.saving import CopyMemory
from spartito.checkpoint.stored_parts import Reader, Slot
from spartito.checkpoint.write_plan import Local, merged, plan
from spartito.errors import UserError
from spartito.storage.stream import CODES
from tests.checkpoint.parts import Part, write_parts

Shape = tuple[int, ...]
SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


def test_names_of_one_tensor_are_in_the_first_file() -> None:
    tied, other = torch.ones(2), torch.ones(3)
    tasks = ({"a": tied, "b": tied}, {"c": other})
    found = plan([{"model": Local.of("model", state, {}).told()} for state in tasks])
    assert [dict(file.aliases) for file in found.files] == [{"b": "a"}, {}]


def values(shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    """Bits of all kinds, NaNs too."""
    generator = torch.Generator().manual_seed(len(shape))
    rows = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    if dtype == torch.bool:
        return rows[..., 0] > 127
    return rows.view(dtype)[..., 0]


def same(one: Tensor, other: Tensor) -> bool:
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    rows = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*rows)


@st.composite
def cuttings(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """Boxes that are a whole tensor: one box is cut again and again, anywhere."""
    boxes = [Box.all_of(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        long = [dim for dim, size in enumerate(box.sizes) if size > 1]
        if not long:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(long))
        at = draw(st.integers(1, box.sizes[dim] - 1))
        one = Box(box.offsets, (*box.sizes[:dim], at, *box.sizes[dim + 1 :]))
        rest = (*box.sizes[:dim], box.sizes[dim] - at, *box.sizes[dim + 1 :])
        moved = (*box.offsets[:dim], box.offsets[dim] + at, *box.offsets[dim + 1 :])
        boxes += [one, Box(moved, rest)]
    return boxes


def at(tensor: Tensor, box: Box) -> Tensor:
    return tensor[box.within(Box.all_of(tensor.shape))]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_cutting_is_read_as_any_other(data: st.DataObject) -> None:
    names = ["a", "a#2", "b.weight"][: data.draw(st.integers(1, 3))]
    dtypes = {name: data.draw(st.sampled_from(list(CODES))) for name in names}
    tensors = {name: values(data.draw(SHAPES), dtypes[name]) for name in names}
    files = data.draw(st.integers(1, 4))
    parts: list[list[Part]] = [[] for _ in range(files)]
    for name, tensor in tensors.items():
        for box in data.draw(cuttings(tuple(tensor.shape))):
            where = data.draw(st.integers(0, files - 1))
            parts[where].append(Part.of(name, at(tensor, box), tensor.shape, box))
    with TemporaryDirectory() as folder:
        for number, own in enumerate(parts):
            write_parts(Path(folder), "model", (number, files), own)
        reader = Reader(folder, "model")
        assert sorted(reader.names) == sorted(tensors)
        for name, tensor in tensors.items():
            assert reader.shape(name) == tuple(tensor.shape)
            assert same(reader.read(name), tensor)
            for box in data.draw(cuttings(tuple(tensor.shape))):
                assert same(reader.read(name, box), at(tensor, box))


@settings(max_examples=200, deadline=None)
@given(data=st.data(), shape=SHAPES)
def test_a_span_is_the_elements_between(data: st.DataObject, shape: Shape) -> None:
    tensor = values(shape, torch.int64)
    dims = tuple(data.draw(st.permutations(range(len(shape)))))
    flat = tensor.permute(dims).reshape(-1)
    start = data.draw(st.integers(0, len(flat)))
    stop = data.draw(st.integers(start, len(flat)))
    found = torch.zeros_like(tensor)
    seen = torch.zeros(shape, dtype=torch.int64)
    parts = SpanCut(shape, start, stop, dims).parts(flat[start:stop])
    for box, part in parts:
        where = box.within(Box.all_of(shape))
        found[where] = part
        seen[where] += 1
    expected = torch.zeros_like(flat)
    expected[start:stop] = flat[start:stop]
    assert torch.equal(found.permute(dims).reshape(-1), expected)
    assert int(seen.max()) <= 1
    assert int(seen.sum()) == stop - start
    assert len(parts) <= max(2 * len(shape) - 1, 1)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), shape=SHAPES.filter(bool))
def test_boxes_that_are_not_the_whole_are_found(data: st.DataObject, shape: Shape) -> None:
    boxes = data.draw(cuttings(shape))
    assert gap(shape, boxes) == ""
    which = data.draw(st.integers(0, len(boxes) - 1))
    assert gap(shape, [*boxes[:which], *boxes[which + 1 :]])
    assert gap(shape, [*boxes, boxes[which]])
    moved = Box((boxes[which].offsets[0] + 1, *boxes[which].offsets[1:]), boxes[which].sizes)
    assert gap(shape, [*boxes[:which], moved, *boxes[which + 1 :]])
    assert boxes_of_span((2, 3), 3, 3) == []


def test_the_first_of_those_with_a_box_writes_it() -> None:
    def local(rows: tuple[int, int]) -> Local:
        whole = torch.arange(12.0).view(4, 3)
        cut = SpanCut((4, 3), rows[0] * 3, rows[1] * 3)
        part = whole.view(-1)[rows[0] * 3 : rows[1] * 3]
        return Local.of("model", {"w": part, "b": torch.ones(2)}, {id(part): cut})

    told = [{"model": local(rows).told()} for rows in [(0, 2), (2, 4), (0, 2), (2, 4)]]
    found = plan(json.loads(json.dumps(told)))
    first, second = found.files
    assert (first.name, first.owner) == ("model-00001-of-00002.safetensors", 0)
    assert (second.name, second.owner) == ("model-00002-of-00002.safetensors", 1)
    assert [slot.name for slot in first.slots] == ["b", "w"]
    assert [slot.name for slot in second.slots] == ["w"]
    with pytest.raises(UserError, match=r"w of model.*not whole.*6 of 12"):
        plan(told[:1])
    other = Local.of("model", {"b": torch.ones(3)}, {}).told()
    with pytest.raises(UserError, match="one task and"):
        plan([*told, {"model": other}])


def test_trees_of_stages_become_one() -> None:
    one = {"state": {"a": {"step": 1}}, "groups": [{"params": ["a"], "lr": 0.1}]}
    two = {"state": {"b": {"step": 1}}, "groups": [{"params": ["b"], "lr": 0.2}]}
    assert merged([one, two, one]) == {
        "state": {"a": {"step": 1}, "b": {"step": 1}},
        "groups": [{"params": ["a", "b"], "lr": 0.1}],
    }
    assert merged([{"x": {"$tensor": "x"}}, {"x": {"$float": "nan"}}]) == {"x": {"$tensor": "x"}}


def test_whole_tensors_of_others_are_read(tmp_path: Path) -> None:
    """As several files of whole tensors, and as one with names that stand for another."""
    parts = [{"a": torch.rand(3)}, {"b": torch.rand(2, 2)}]
    for number, part in enumerate(parts):
        save_file(part, tmp_path / f"model-0000{number + 1}-of-00002.safetensors")
    reader = Reader(tmp_path, "model")
    assert {name: reader.read(name).tolist() for name in reader.names} == {
        name: tensor.tolist() for part in parts for name, tensor in part.items()
    }
    tied = write_parts(
        tmp_path,
        "tied",
        (0, 1),
        [Part.of("a", torch.ones(2), (2,), Box((0,), (2,)))],
        {"b": "a"},
    )
    found = Reader(tmp_path, "tied").all()
    assert found["a"] is found["b"]
    assert [*load_file(tied)] == ["a"]


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    whole = torch.rand(4, 2)
    for number, box in enumerate([Box((0, 0), (2, 2)), Box((2, 0), (2, 2))]):
        write_parts(tmp_path, "model", (number, 2), [Part.of("w", at(whole, box), (4, 2), box)])
    second = tmp_path / "model-00002-of-00002.safetensors"
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00002.safetensors is missing"):
        Reader(tmp_path, "model")
    second.write_bytes(kept[:-3])
    with pytest.raises(UserError, match=r"model-00002-of-00002.safetensors is not a safetensors"):
        Reader(tmp_path, "model")
    second.write_bytes((tmp_path / "model-00001-of-00002.safetensors").read_bytes())
    with pytest.raises(UserError, match=r"w is not complete.*overlap"):
        Reader(tmp_path, "model")


def test_copies_that_are_still_written_are_not_overwritten() -> None:
    """A save that was given up may still write from them when the next one copies."""
    slot, copies = Slot("weight", (3,), torch.float32, Box.all_of((3,))), CopyMemory()
    first = copies.of({"model": {slot: torch.ones(3)}})["model"][slot]
    again = copies.of({"model": {slot: torch.ones(3)}})["model"][slot]
    assert again.data_ptr() == first.data_ptr()
    copies.user = first
    second = copies.of({"model": {slot: torch.zeros(3)}})["model"][slot]
    assert first.tolist() == [1, 1, 1]
    assert second.tolist() == [0, 0, 0]
