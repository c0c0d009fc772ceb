"""Data sets of Hugging Face's ``datasets``: what they hold comes out, by whole columns."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import spartito as sp
from spartito.data.memory import which_examples
from spartito.data.reading.loader import Loader
from spartito.errors import UserError

hugging_face = pytest.importorskip("datasets", reason="dev: datasets")
split_dataset_by_node = pytest.importorskip("datasets.distributed").split_dataset_by_node

COUNT = 50


def table(**columns: Any) -> Any:
    return hugging_face.Dataset.from_dict(columns)


def plain() -> Any:
    numbers = range(COUNT)
    words = [f"word {n}" for n in numbers]
    return table(y=list(numbers), x=[[n, n + 0.1] for n in numbers], words=words)


def ids(batches: Iterator[Any]) -> list[int]:
    return [number for batch in batches for number in batch.data["y"].tolist()]


@pytest.mark.parametrize("kind", [None, "numpy", "torch"])
@pytest.mark.parametrize("step", [1, -3])
def test_columns_are_those_of_the_table(kind: str | None, step: int) -> None:
    """In each format, of a whole table and of chosen rows."""
    numbers = list(range(COUNT))[::step]
    data = plain().with_format(kind)
    found = sp.data.as_dataset(data if step == 1 else data.select(numbers), batch_size=8)
    batches = list(found)
    assert list(batches[0]) == ["y", "x", "words"]
    assert torch.cat([batch["y"] for batch in batches]).tolist() == numbers
    x = torch.cat([batch["x"] for batch in batches])
    assert x.dtype == (torch.float64 if kind is None else torch.float32)  # as their owner reads
    expected = torch.tensor([[n, n + 0.1] for n in numbers], dtype=torch.float64)
    assert torch.equal(x, expected.to(x.dtype))
    assert [word for batch in batches for word in batch["words"]] == [f"word {n}" for n in numbers]
    batches[0]["y"][:] = -1  # which is no write into the file of the table
    assert next(iter(found))["y"].tolist() == numbers[:8]


def test_maps_get_examples_as_the_table_gives_them() -> None:
    seen = list[Any]()

    def pair(example: Any) -> Any:
        seen.append(type(example["x"]))
        return example["x"], example["y"]

    data = sp.data.as_dataset(plain(), batch_size=None).map(pair).batch(4)
    x, y = next(iter(data))
    assert set(seen) == {list}
    assert x.tolist() == [[n, n + 0.1] for n in range(4)]
    assert y.tolist() == [0, 1, 2, 3]


def test_order_and_resuming_are_those_of_any_data_by_index() -> None:
    data = sp.data.as_dataset(plain(), batch_size=7).shuffle()
    alone = [batch.data["y"].tolist() for batch in Loader(data, seed=5)]
    assert sorted(n for batch in alone for n in batch) == list(range(COUNT))
    for count in (2, 3):
        found = []
        for index in range(count):
            loader = Loader(data, (index, count), seed=5)
            loader.load_state_dict({"pass": 0, "step": 3})
            found.append([batch.data["y"].tolist() for batch in loader])
        joined = [[n for part in parts for n in part] for parts in zip(*found, strict=True)]
        assert joined == alone[3:]


class Reads:
    """A data set that tells how it was read, and has an example that cannot be."""

    def __init__(self) -> None:
        self.together = list[list[int]]()
        self.alone = list[int]()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        self.alone.append(index)
        if index == 9:
            raise sp.CorruptSampleError("nine")
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.together.append(indices)
        if 9 in indices:
            raise ValueError("one of them")
        return indices


def test_any_data_set_reads_together_what_it_can() -> None:
    """As torch's own loader asks it; and one by one where that fails, which tells the example."""
    data = Reads()
    found = Loader(sp.data.as_dataset(data, batch_size=4).map(lambda x: x + 100))
    assert [batch.data.tolist() for batch in found] == [
        *([100, 101, 102, 103], [104, 105, 106, 107], [108, 110, 111])
    ]
    assert data.together == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert data.alone == [8, 9, 10, 11]


def test_loaders_of_torch_over_tables() -> None:
    loader = DataLoader(plain().with_format("torch"), batch_size=8, shuffle=True)
    found = Loader(sp.data.as_dataset(loader), seed=1)
    assert sorted(ids(iter(found))) == list(range(COUNT))


def test_tables_are_mixed_with_other_data() -> None:
    chosen = sp.data.as_dataset(plain().select_columns("y"), batch_size=None).shuffle(seed=2)
    other = sp.data.arrays({"y": torch.arange(100, 150)})
    mixed = sp.data.mix({"table": chosen, "other": other}, {"table": 1, "other": 1})
    assert sorted(ids(iter(Loader(mixed.batch(8))))) == [*range(50), *range(100, 150)]
    assert "a Dataset of Hugging Face: 50 examples of y" in chosen.describe()


def test_pictures_are_decoded(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 256, (4, 5, 3), dtype=np.uint8) for _ in range(3)]
    features = hugging_face.Features(
        {"image": hugging_face.Image(), "y": hugging_face.Value("int64")}
    )
    images = [PIL.Image.fromarray(each) for each in pixels]
    data = hugging_face.Dataset.from_dict({"image": images, "y": [0, 1, 2]}, features=features)
    batch = next(iter(sp.data.as_dataset(data)))
    assert batch["image"].shape == (3, 3, 4, 5)
    assert (batch["image"].permute(0, 2, 3, 1).numpy() == np.stack(pixels)).all()
    assert batch["y"].tolist() == [0, 1, 2]
    theirs = next(iter(sp.data.as_dataset(data.with_format("torch"))))
    assert torch.equal(batch["image"], theirs["image"])
    mapped = sp.data.as_dataset(data, batch_size=None).map(lambda e: e["image"].resize((2, 2)))
    assert next(iter(mapped.batch(2))).shape == (2, 3, 2, 2)


def test_a_transform_of_the_table_makes_the_examples() -> None:
    def made(columns: Any) -> Any:
        return {"twice": [torch.tensor(2 * n) for n in columns["y"]]}

    batch = next(iter(sp.data.as_dataset(plain().with_transform(made), batch_size=4)))
    assert batch["twice"].tolist() == [0, 2, 4, 6]


def test_what_is_null_is_a_corrupt_example(caplog: pytest.LogCaptureFixture) -> None:
    data = table(y=[0, None, 2, 3], words=["a", "b", None, "d"])
    assert ids(iter(Loader(sp.data.as_dataset(data)))) == [0, 3]
    assert "'y' of example 1 is null" in caplog.text
    assert "'words' of example 2 is null" in caplog.text


def test_a_picture_that_is_none_is_a_corrupt_example(caplog: pytest.LogCaptureFixture) -> None:
    file = io.BytesIO()
    PIL.Image.new("RGB", (4, 4)).save(file, "PNG")
    good, bad = ({"bytes": data, "path": None} for data in (file.getvalue(), b"no picture"))
    features = {"image": hugging_face.Image(), "y": hugging_face.Value("int64")}
    data = hugging_face.Dataset.from_dict(
        {"image": [good, bad, good, good], "y": [0, 1, 2, None]},
        features=hugging_face.Features(features),
    )
    assert ids(iter(Loader(sp.data.as_dataset(data)))) == [0, 2]
    assert "example 1 cannot be decoded: cannot identify image" in caplog.text
    mapped = sp.data.as_dataset(data, batch_size=None).map(lambda e: {"y": e["y"] or 0})
    assert ids(iter(Loader(mapped.batch(4)))) == [0, 2, 0]
    assert "'y' of example 3 is null" in caplog.text

    def wrong(columns: Any) -> Any:
        raise ValueError("of mine")

    with pytest.raises(ValueError, match="of mine") as seen:
        next(iter(sp.data.as_dataset(data.with_transform(wrong))))
    assert seen.value.__notes__ == ["This was example 0 of the Dataset."]


def test_what_cannot_be_is_refused() -> None:
    splits = hugging_face.DatasetDict(train=plain(), test=plain())
    with pytest.raises(UserError, match=r"'train', 'test'\n  Give one of them: data\['train'\]"):
        sp.Trainer(nn.Linear(2, 1)).evaluate(splits)
    with pytest.raises(UserError, match=r"format 'pandas'\n  Give data.with_format"):
        sp.data.as_dataset(plain().with_format("pandas"))
    ragged = sp.data.as_dataset(table(x=[[1], [1, 2]]))
    with pytest.raises(UserError, match=r"shapes \[\(1,\), \(2,\)\] in one batch"):
        next(iter(ragged))


def test_parts_of_a_table_are_told_apart() -> None:
    """Who divides a table by ranks gives each task a part, of which it would read a part again."""
    whole, *parts = (
        which_examples(sp.data.as_dataset(data).source)
        for data in (plain(), plain().shard(2, 0), plain().shard(2, 1), plain())
    )
    assert whole == parts[2]
    assert len({whole, *parts}) == 3
    stream = split_dataset_by_node(plain().to_iterable_dataset(num_shards=2), 1, 2)
    for given in (stream, DataLoader(stream)):
        with pytest.raises(UserError, match="split_dataset_by_node has divided among 2"):
            sp.data.as_dataset(given)


def test_windows_over_the_tokens_of_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of texts and of tokens, of chosen rows; texts become tokens once for all that is equal."""
    monkeypatch.setenv("SPARTITO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("spartito.data.windows.documents.TARGET", 300)
    calls = list[str]()

    def letters(text: str) -> list[int]:
        calls.append(text)
        return list(text.encode())

    options: dict[str, Any] = {"tokenizer": letters, "tokenizer_name": "bytes", "eos": 0}
    data = plain().select(range(COUNT - 1, 0, -2))
    expected = "".join(f"word {n}\0" for n in range(COUNT - 1, 0, -2)).encode()
    for _ in range(2):
        found = sp.data.tokens(data, 8, "words", **options)
        batches = list(found.batch(4))
        assert (
            bytes(torch.cat([x for x, _ in batches]).flatten().tolist())
            == expected[: len(found) * 8]
        )
        assert "a Dataset of Hugging Face, 25 examples, 195 tokens" in found.describe()
    assert len(found.source.edges) > 3  # type: ignore[union-attr]
    assert len(calls) == 25
    ids = table(input_ids=[[n, n] for n in range(20)])
    row = next(iter(sp.data.tokens(ids, 6, "input_ids", for_transformers=True)))
    assert row["input_ids"].tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(UserError, match="no column 'wrds'"):
        sp.data.tokens(data, 8, "wrds", **options)
    with pytest.raises(UserError, match="without separator and format"):
        sp.data.tokens(data, 8, "words", separator="\n", **options)
    with pytest.raises(UserError, match="'train'"):
        sp.data.tokens(hugging_face.DatasetDict(train=data), 8, "words", **options)


# ---- streams


def test_streams_are_shuffled_by_the_pass_and_read_past_what_was_seen() -> None:
    """A pass has an order of its own, the same on each replica and where it is resumed."""

    def made() -> sp.data.Dataset:
        stream = plain().to_iterable_dataset(num_shards=5).shuffle(seed=3, buffer_size=20)
        return sp.data.as_dataset(stream, batch_size=7)

    def batches(shard: tuple[int, int], epoch: int, start: int) -> list[list[int]]:
        loader = Loader(made(), shard)
        loader.load_state_dict({"pass": epoch, "step": start})
        return [batch.data["y"].tolist() for batch in loader]

    first, second = batches((0, 1), 0, 0), batches((0, 1), 1, 0)
    flat = [[n for batch in each for n in batch] for each in (first, second)]
    assert flat[0] != flat[1]
    assert sorted(flat[0]) == sorted(flat[1]) == list(range(COUNT))
    parts = [batches((index, 2), 1, 3) for index in range(2)]
    assert [a + b for a, b in zip(*parts, strict=True)] == second[3:]
    x = next(iter(made()))["x"]
    assert x.shape == (7, 2)
    with pytest.raises(UserError, match="shuffle where it is made"):
        made().shuffle()


def test_fit_takes_tables_and_streams() -> None:
    """Its columns go to the model by name, ``y`` to the loss."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.layer(x / 50)
            return found[:, 0]

    figures = []
    for data in (plain(), plain().to_iterable_dataset()):
        torch.manual_seed(0)
        net = Net()
        trainer = sp.Trainer(
            net,
            optimizer=torch.optim.SGD(net.parameters(), 0.01),
            loss=nn.functional.mse_loss,
        )
        chosen = data.remove_columns("words")
        figures.append(trainer.fit(chosen, batch_size=10, epochs=2, verbose=0).history["loss"])
    assert figures[0] == pytest.approx(figures[1])
    assert figures[0][1] < figures[0][0]
