"""Examples become batches in the layout that they have."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import default_collate

from spartito.data.reading.collate import (
    Form,
    collate,
    count_rows,
    form,
    kept_rows,
    part_of,
    rows,
    take,
    tidy,
)
from spartito.errors import UserError


def test_views_of_interleaved_images_become_channels_last() -> None:
    images = [torch.rand(4, 5, 3).permute(2, 0, 1) for _ in range(3)]
    batch = collate(images)
    assert batch.shape == (3, 3, 4, 5)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert not batch.is_contiguous()
    assert torch.equal(batch, torch.stack(images))
    planar = collate([image.contiguous() for image in images])
    assert planar.is_contiguous()
    assert torch.equal(planar, batch)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 2)])
def test_tensors_are_stacked(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    examples = [torch.full(shape, n).to(dtype) for n in range(4)]
    batch = collate(examples)
    assert batch.dtype == dtype
    assert torch.equal(batch, torch.stack(examples))
    assert not collate([torch.ones(2, requires_grad=True)]).requires_grad


def test_structures() -> None:
    examples = [
        ({"a": np.full(2, n), "b": n}, float(n), True, f"text {n}", [n, np.float64(n)])
        for n in range(3)
    ]
    inner, number, flag, text, pair = collate(examples)
    assert inner["a"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert inner["b"].dtype == torch.int64
    assert (number.dtype, flag.dtype) == (torch.float64, torch.bool)
    assert text == ["text 0", "text 1", "text 2"]
    assert pair[0].tolist() == [0, 1, 2]
    assert pair[1].dtype == torch.float64
    assert collate([np.str_("a"), np.str_("b")]) == ["a", "b"]


@pytest.mark.parametrize(
    ("examples", "text"),
    [
        ([torch.zeros(2), torch.zeros(3)], r"examples of the shapes \[\(2,\), \(3,\)\]"),
        ([np.zeros(2), np.zeros((1, 2))], r"examples of the shapes \[\(1, 2\), \(2,\)\]"),
        ([torch.zeros(2).long(), torch.zeros(2)], "dtypes torch.float32, torch.int64 in one"),
        ([np.zeros(2), np.zeros(2, np.int8)], "examples of the dtypes float64, int8 in one"),
    ],
)
def test_examples_that_make_no_batch(examples: list[Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        collate(examples)


def test_batches_of_others_are_made_like_ours() -> None:
    examples = [(torch.full((2,), float(n)), {"y": n}, f"t{n}") for n in range(3)]
    batch = tidy(default_collate(examples))
    assert isinstance(batch, tuple)
    x, y, texts = batch
    assert x.shape == (3, 2)
    assert y["y"].tolist() == [0, 1, 2]
    assert texts == ["t0", "t1", "t2"]
    assert tidy([np.zeros(3), [np.ones(3), np.ones(3)]])[1][0].tolist() == [1.0] * 3
    assert tidy(["a", "b"]) == ["a", "b"]
    names = np.array(["a", "b"])
    assert tidy(names) is names


class Pair(NamedTuple):
    image: Any
    label: Any


def test_names_of_parts_are_kept() -> None:
    examples = [Pair(torch.full((2,), float(n)), n) for n in range(3)]
    for batch in (collate(examples), tidy(default_collate(examples))):
        found = take(rows(batch, lambda tensor: tensor + 1), torch.tensor([2]))
        assert found.image.tolist() == [[3, 3]]
        assert found.label.tolist() == [3]


def test_packed_sequences_stay_such() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(4)], enforce_sorted=False)
    batch = rows(tidy((packed, [1, 2])), Tensor.double)
    assert isinstance(batch[0], PackedSequence)
    assert batch[0].data.dtype == torch.float64
    assert batch[0].batch_sizes.tolist() == [2, 2, 1, 1]
    assert form((batch[0], torch.ones(2))) == Form(2, "whole")


def test_rows_of_tensors_and_lists() -> None:
    data = (torch.arange(4), {"x": torch.arange(8).view(4, 2), "name": list("abcd"), "n": 4})
    y, named = take(data, torch.tensor([3, 1]))
    assert y.tolist() == [3, 1]
    assert named["x"].tolist() == [[6, 7], [2, 3]]
    assert (named["name"], named["n"]) == (["d", "b"], 4)
    none = take(data, torch.empty(0, dtype=torch.int64))
    assert count_rows(none) == 0
    assert none[1]["name"] == []
    doubled = rows(data, lambda tensor: tensor * 2)
    assert doubled[0].tolist() == [0, 2, 4, 6]
    assert doubled[1]["name"] == list("abcd")


RAGGED = tuple(torch.arange(n) for n in (3, 5, 4))


@pytest.mark.parametrize(
    ("data", "size", "expected"),
    [
        ((torch.ones(3, 2), {"y": torch.ones(3), "names": ["a"] * 3}, 0.5), None, (3, "rows")),
        (((torch.ones(2), torch.ones(2)), torch.ones(2)), 2, (2, "rows")),  # two inputs
        ({"x": torch.ones(3, 2), "scale": torch.tensor(2.0)}, None, (3, "rows")),
        ((RAGGED, torch.ones(3)), None, (3, "parts")),
        ((RAGGED, ({"boxes": torch.ones(1, 4)},) * 3), 3, (3, "parts")),
        (((torch.ones(4),) * 3, (0, 1, 2)), None, (3, "parts")),  # all of one length
        ({"x": RAGGED, "y": (torch.tensor(1.0),) * 3}, None, (3, "parts")),
        ((torch.ones(5, 3, 2), torch.ones(3)), None, (3, "whole")),  # time comes first
        ((torch.ones(5, 3), torch.ones(5, 3)), 3, (3, "whole")),
        ({"x": torch.ones(3, 2), "table": torch.ones(9)}, None, (3, "whole")),
        ((torch.tensor(1.0), "text"), None, None),
    ],
)
def test_how_examples_lie_in_a_batch(data: Any, size: int | None, expected: Any) -> None:
    found = form(data, size)
    assert found == expected
    if found is None or found.kind == "whole":
        return
    parts = [part_of(data, torch.tensor([n]), found) for n in range(found.size)]
    if found.kind == "parts":
        first, *_ = parts[1].values() if isinstance(data, dict) else parts[1]
        assert len(first) == 1
        assert torch.equal(first[0], (data["x"] if isinstance(data, dict) else data[0])[1])
    assert all(form(part, 1) in ((1, "rows"), (1, "parts")) for part in parts)


@pytest.mark.parametrize(
    ("data", "count"),
    [
        ((torch.ones(3, 2), torch.ones(3)), 3),  # one of four was left out
        ({"x": torch.ones(2, 7)}, 2),
        ((torch.ones(3, 4), torch.ones(3, 4)), 4),  # time comes first
        ((torch.ones(8, 2), torch.ones(8)), 4),  # two of each
        ({"x": torch.ones(1, 9), "labels": torch.ones(1, 9)}, 4),  # all in one row
        ((torch.ones(1, 9), torch.ones(1)), 1),
        ((torch.ones(1), torch.ones(1)), 1),
        ((torch.ones(3, 2), torch.ones(4)), 4),
        ((torch.ones(3, 2), ["a"] * 3), 4),
        (torch.ones(0, 2), 0),
    ],
)
def test_what_a_collate_function_leaves_out(data: Any, count: int) -> None:
    assert kept_rows(data, 4) == count


def test_how_many() -> None:
    assert count_rows(torch.zeros(3, 2)) == 3
    assert count_rows((torch.zeros(3), 1)) == 3
    assert count_rows({"a": [torch.zeros(5)]}) == 5
    nothings: list[Any] = [torch.tensor(1.0), (), {}, "text", 3]
    for nothing in nothings:
        with pytest.raises(UserError, match="has no rows"):
            count_rows(nothing)
