"""Batches on a device, and what the host knows of labels there; ``meta`` is one without values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spartito import data
from spartito.data.batch import Batch
from spartito.data.memory import Arrays
from spartito.data.reading.loader import Loader
from spartito.data.reading.placing import FEW, HOST, Placing, known_to_host

META = Placing(torch.device("meta"))


def labels() -> Tensor:
    return torch.tensor([3, 1, -100, 2])


def test_the_host_knows_labels_that_came_from_its_memory() -> None:
    x, y = torch.rand(4, 2), labels()
    moved = META.move({"x": (x,), "y": y})
    assert moved["y"].is_meta
    assert moved["x"][0].is_meta
    known = known_to_host(moved["y"])
    assert known is not None
    assert known.tolist() == [3, 1, -100, 2]
    assert known_to_host(y) is y


@pytest.mark.parametrize("written", ["there", "here"])
def test_the_host_does_not_know_what_was_written_to_since(written: str) -> None:
    y = labels()
    moved = META.move(y)
    (moved if written == "there" else y).fill_(0)
    assert known_to_host(moved) is None


def test_the_host_does_not_know_what_it_would_take_long_to_look_at() -> None:
    for tensor in (torch.rand(4), torch.zeros(FEW + 1, dtype=torch.long)):
        assert known_to_host(META.move(tensor)) is None
    assert known_to_host(torch.zeros(4, dtype=torch.long, device="meta")) is None
    with torch.inference_mode():
        assert known_to_host(META.move(labels())) is None


def test_what_is_where_it_belongs_stays() -> None:
    x, there = torch.rand(4, 2), torch.zeros(4, device="meta")
    assert HOST.move(x) is x
    assert HOST.ready(x) is x
    assert META.ready(x) is x
    assert META.move(there) is there


def test_small_batches_are_placed_together() -> None:
    """They share memory on the device, and the host knows the labels of each."""
    source = Arrays(torch.rand(20, 2), torch.arange(20))
    parts = source.gather_each([slice(0, 5), torch.tensor([7, 3])], META)
    assert [[tuple(t.shape) for t in part] for part in parts] == [[(5, 2), (5,)], [(2, 2), (2,)]]
    first, second = (part[0].untyped_storage()._cdata for part in parts)
    assert first == second
    known = [known_to_host(part[1]) for part in parts]
    assert [None if each is None else each.tolist() for each in known] == [
        [0, 1, 2, 3, 4],
        [7, 3],
    ]
    parts[0][1].fill_(0)
    assert known_to_host(parts[0][1]) is None
    assert known_to_host(parts[1][1]) is not None


def test_batches_are_placed_after_their_maps() -> None:
    """What is applied to a batch gets it in the host's memory."""
    chain = data.arrays(torch.rand(20, 2), torch.arange(20)).batch(5)
    plain: list[Batch] = list(Loader(chain, placing=META))
    assert all(batch.x.is_meta for batch in plain)
    mapped = list(Loader(chain.map(lambda x, y: (x.numpy() * 2, y)), placing=META))
    assert not any(batch.y.is_meta for batch in mapped)
