"""Mixtures: exact shares, each part in its own order, the same under any number of workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import spartito as sp
from spartito.data.dataset import Dataset
from spartito.data.mixture import Mixture
from spartito.data.reading.loader import Loader
from spartito.errors import CorruptSampleError, UserError
from tests.data.packed_files import write_all


def numbers(first: int, count: int) -> Dataset:
    return sp.data.arrays(torch.arange(first, first + count))


def passes(data: Dataset, count: int, seed: int = 7) -> list[list[int]]:
    """The examples of the first passes, in their order."""
    loader = Loader(data, seed=seed)
    return [[int(x) for batch in loader for x in batch.data] for _ in range(count)]


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.05, 1), min_size=4, max_size=4),
    shuffled=st.booleans(),
    seed=st.integers(0, 2**40),
)
def test_each_part_is_used_up_before_it_comes_again(
    sizes: list[int], weights: list[float], shuffled: bool, seed: int
) -> None:
    parts = {f"{n}": numbers(100 * n, size) for n, size in enumerate(sizes)}
    if shuffled:
        parts = {name: part.shuffle() for name, part in parts.items()}
    data = sp.data.mix(parts, dict(zip(parts, weights, strict=False)), size=40).batch(7)
    source = data.source
    assert isinstance(source, Mixture)
    seen = passes(data, 5, seed)
    total = sum(weights[: len(sizes)])
    for number, (part, size) in enumerate(zip(source.parts, sizes, strict=True)):
        assert abs(part.count - 40 * weights[number] / total) < 1
        own = [[x for x in one if x // 100 == number] for one in seen]
        assert [len(one) for one in own] == [part.count] * 5
        stream = [x for one in own for x in one]
        whole = list(range(100 * number, 100 * number + size))
        for start in range(0, len(stream) - size + 1, size):
            assert sorted(stream[start : start + size]) == whole
        if not shuffled:
            assert stream[:size] == whole[: len(stream)]


def test_how_many_a_pass_has() -> None:
    parts = {"web": numbers(0, 70), "code": numbers(100, 60)}
    weights = {"web": 0.7, "code": 0.3}
    assert len(sp.data.mix(parts, weights).source) == 100  # type: ignore[arg-type]
    assert len(sp.data.mix(parts, weights, size="longest").source) == 200  # type: ignore[arg-type]
    every = sp.data.mix(parts).batch(10)
    assert sorted(passes(every, 1)[0]) == [*range(70), *range(100, 160)]
    told = sp.data.mix(parts, weights, size="longest").describe()
    assert "web: 70.0% of a pass, 140 examples, 2 times its 70" in told
    assert "code: 30.0% of a pass, 60 examples, 1 times its 60" in told
    source = sp.data.mix(parts, weights).source
    assert isinstance(source, Mixture)
    assert source.shares == {"web": 0.7, "code": 0.3}


def ids(loaders: Iterable[Any]) -> list[list[int]]:
    """The examples of each global batch, of all replicas in their order."""
    return [
        [int(x) for batch in step for x in batch.data["y"]] for step in zip(*loaders, strict=True)
    ]


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """Packed files in blocks, a part of them, and single examples that are mapped."""
    monkeypatch.setenv("SPARTITO_CACHE", str(tmp_path / "cache"))
    write_all(tmp_path / "packed", "parquet", (23, 40))
    packed = sp.data.packed(tmp_path / "packed", columns=("tokens", "y"))
    odd = sp.data.packed(
        tmp_path / "packed", columns=("tokens", "y"), where={"y": lambda y: y % 2 == 1}
    ).map(lambda tokens, y: {"tokens": tokens, "y": y + 1000})

    class Own(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 30

        def __getitem__(self, index: int) -> Any:
            if index == 11:
                raise CorruptSampleError("the eleventh")
            return {"tokens": torch.full((7,), index, dtype=torch.int32), "y": 2000 + index}

    return sp.data.mix(
        {
            "packed": packed.map(lambda tokens, y: {"tokens": tokens, "y": y}).shuffle(blocks=2),
            "odd": odd.shuffle(5, blocks=3),
            "own": Dataset(Own()).shuffle(),
        },
        {"packed": 3, "odd": 2, "own": 1},
        size=100,
    ).batch(9)


def test_the_same_at_any_number_of_workers_and_after_a_restart(mixed: Dataset) -> None:
    alone = Loader(mixed, seed=3)
    whole = [ids([alone]), ids([alone])]
    counted = Counter(y // 1000 for batch in whole[0] for y in batch)
    assert counted[0] == 50
    assert counted[1] == 33
    assert counted[2] in (16, 17)  # one cannot be read
    assert all(y % 2 for batch in whole[0] for y in batch if y // 1000 == 1)
    for workers in (2, 3):
        loaders = [Loader(mixed, (n, workers), seed=3) for n in range(workers)]
        assert [ids(loaders), ids(loaders)] == whole
    for step in (1, 7):
        loaders = [Loader(mixed, (n, 2), seed=3) for n in range(2)]
        for loader in loaders:
            loader.load_state_dict({"pass": 1, "step": step})
        assert ids(loaders) == whole[1][step:]


def test_a_training_goes_on_only_with_the_same_mixture(mixed: Dataset) -> None:
    from spartito.training.files.resume import meaning

    other = sp.data.mix({"packed": numbers(0, 50), "odd": numbers(0, 50)}, size=100).batch(9)
    assert meaning(mixed, None, 1)["blocks"] != meaning(other, None, 1)["blocks"]


@pytest.mark.parametrize(
    ("parts", "options", "words"),
    [
        ({}, {}, "nothing to mix"),
        ({"a": [1, 2]}, {}, "'a' is a list"),
        ({"a": numbers(0, 9).batch(3)}, {}, "'a' has batches"),
        ({"a": numbers(0, 9)}, {"weights": {"b": 1}}, "weights of b, and data sets a"),
        ({"a": numbers(0, 9)}, {"weights": {"a": 0}}, "the weight of 'a' is 0"),
        ({"a": numbers(0, 9)}, {"weights": {"a": float("nan")}}, "the weight of 'a' is nan"),
        ({"a": numbers(0, 9)}, {"size": "both"}, "size='both'"),
        ({"a": numbers(0, 9)}, {"size": True}, "size=True"),
        ({"a": numbers(0, 9), "b": numbers(0, 9)}, {"weights": {"a": 1, "b": 1e-6}}, "none of 'b'"),
        ({"a": numbers(0, 9).map(sp.data.RandomFlip())}, {}, "changed at random"),
        ({"a": numbers(0, 9).repeat(2)}, {}, "repeats of its own"),
        ({"a": sp.data.mix({"b": numbers(0, 9)})}, {}, "a mixture itself"),
    ],
)  # fmt: skip
def test_what_cannot_be_mixed_is_refused(
    parts: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        sp.data.mix(parts, **options)


def test_other_forms_are_named() -> None:
    floats = sp.data.arrays(torch.arange(9.0))
    with pytest.raises(UserError, match=r"examples of a, b make no batch together.*dtypes"):
        passes(sp.data.mix({"a": numbers(0, 9), "b": floats}).batch(18), 1)
    pairs = sp.data.arrays(np.arange(9), np.arange(9))
    with pytest.raises(UserError, match="Tensor and tuple"):
        passes(sp.data.mix({"a": numbers(0, 9), "b": pairs}).batch(18), 1)
    with pytest.raises(UserError, match="order of its own"):
        sp.data.mix({"a": numbers(0, 9)}).shuffle()
