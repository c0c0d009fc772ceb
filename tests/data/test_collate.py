"""Examples become batches in the layout that they have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from spartito.data.collate import collate, count_rows, rows, take, tidy
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
    assert (number.dtype, flag.dtype) == (torch.float32, torch.bool)
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
    assert list(texts) == ["t0", "t1", "t2"]
    assert tidy([np.zeros(3), [np.ones(3), np.ones(3)]])[1][0].tolist() == [1.0] * 3
    assert tidy(["a", "b"]) == ["a", "b"]
    names = np.array(["a", "b"])
    assert tidy(names) is names


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


def test_how_many() -> None:
    assert count_rows(torch.zeros(3, 2)) == 3
    assert count_rows((torch.zeros(3), 1)) == 3
    assert count_rows({"a": [torch.zeros(5)]}) == 5
    nothings: list[Any] = [torch.tensor(1.0), (), {}, "text", 3]
    for nothing in nothings:
        with pytest.raises(UserError, match="has no rows"):
            count_rows(nothing)
