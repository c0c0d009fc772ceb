"""Arrays in memory as a source."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spartito.data.memory import Arrays
from spartito.data.reading.collate import take
from spartito.errors import UserError


def test_rows_one_by_one_and_many_at_once() -> None:
    x, y = np.arange(12, dtype=np.float32).reshape(6, 2), [0, 1, 2, 3, 4, 5]
    source = Arrays(x, y)
    assert len(source) == 6
    one, label = source[2]
    assert (one.tolist(), label.item()) == ([4.0, 5.0], 2)
    many, labels = source.gather(torch.tensor([5, 0, 5]))
    assert many.tolist() == [[10.0, 11.0], [0.0, 1.0], [10.0, 11.0]]
    assert labels.tolist() == [5, 0, 5]
    assert source.gather(slice(1, 3))[0].tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert source.gather(slice(3, 3))[0].shape == (0, 2)


def test_an_array_that_was_turned_round() -> None:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert Arrays(x[::-1]).gather(slice(0, 2)).tolist() == [[4.0, 5.0], [2.0, 3.0]]
    assert Arrays(x[:, ::-1])[1].tolist() == [3.0, 2.0]


def test_changes_in_place_do_not_reach_the_users_arrays() -> None:
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    source = Arrays(x, torch.arange(6))
    for given in (source[2], source.gather(slice(0, 6)), source.gather(torch.arange(6))):
        given[0].zero_()
        given[1].zero_()
    assert x.sum() == 66
    assert source[5][1].item() == 5


def test_one_array_and_named_ones() -> None:
    alone = Arrays(torch.arange(3))
    assert alone[1].item() == 1
    assert alone.gather(slice(0, 2)).tolist() == [0, 1]
    named = Arrays({"x": torch.zeros(3, 2), "y": torch.arange(3)})
    assert named[2]["y"].item() == 2
    assert named.gather(torch.tensor([1]))["x"].shape == (1, 2)


def test_what_makes_no_data_set() -> None:
    with pytest.raises(UserError, match="arrays of 3, 4 examples"):
        Arrays(torch.zeros(3), torch.zeros(4))
    with pytest.raises(UserError, match="arrays of None examples"):
        Arrays(torch.tensor(1.0))
    with pytest.raises(UserError, match=r"arrays\(\) got no array"):
        Arrays()
    with pytest.raises(UserError, match=r"arrays\(\) got no array"):
        Arrays({})
    with pytest.raises(UserError, match="texts are no numbers"):
        Arrays(np.array(["a", "b"]))


def test_small_batches_are_copied_together_and_are_apart() -> None:
    x = torch.arange(40.0).reshape(20, 2).requires_grad_(False)
    before = x.clone()
    source = Arrays(x, {"y": torch.arange(20)})
    parts: list[slice | torch.Tensor] = [
        slice(0, 3),
        torch.tensor([19, 0, 19]),
        slice(5, 5),
        slice(18, 20),
    ]
    found = source.gather_each(parts)
    for part, (rows, rest) in zip(parts, found, strict=True):
        assert torch.equal(rows, before[part])
        assert torch.equal(rest["y"], torch.arange(20)[part])
    weight = torch.ones(2, 1, requires_grad=True)
    loss = (found[0][0] @ weight).sum()
    found[1][0].mul_(100)  # what a graph keeps of another batch is not changed by it
    loss.backward()
    assert torch.equal(found[0][0], before[:3])
    assert torch.equal(x, before)


def test_how_many_batches_are_copied_together() -> None:
    assert Arrays(torch.zeros(1000, 1024)).at_once(32) == 8  # of 128 KiB
    assert Arrays(torch.zeros(1000, 1024)).at_once(1000) == 1
    assert Arrays(torch.zeros(1000, 1)).at_once(0) == 16
    photos = torch.zeros(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    assert Arrays(photos).at_once(1) == 1  # to keep how they lie
    sparse = torch.eye(4).to_sparse()
    assert Arrays(sparse).at_once(1) == 1
    assert torch.equal(Arrays(sparse).gather(torch.tensor([2])).to_dense(), torch.eye(4)[2:3])
    assert Arrays(torch.zeros(4, requires_grad=True)).at_once(1) == 1


def test_rows_of_sparse_tensors_and_of_nested_ones() -> None:
    one = torch.eye(3)
    sparse = Arrays(one.to_sparse(), one)
    for which in (slice(1, 3), torch.tensor([2, 0])):
        for got in (sparse.gather(which), take((one.to_sparse(), one), which)):
            assert [torch.equal(part.to_dense(), one[which]) for part in got] == [True, True]
    ragged = torch.nested.nested_tensor([torch.ones(n) for n in (1, 2, 3)], layout=torch.jagged)
    with pytest.raises(UserError, match="data in a nested tensor, of which no rows"):
        Arrays(ragged, one)
    with pytest.raises(UserError, match="data in a nested tensor, of which no rows"):
        take((ragged, one), slice(0, 2))
