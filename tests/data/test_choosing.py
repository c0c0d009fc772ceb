"""Splits by hash and filters of packed files: which examples, whoever reads them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import spartito as sp
from spartito.data.blocks import json_lines
from spartito.data.blocks.choosing import ChosenSource
from spartito.data.dataset import Dataset
from spartito.data.reading.loader import Loader
from spartito.errors import UserError
from tests.data.packed_files import write_all, write_lines, write_parquet
from tests.data.web_server import serving


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks of a few examples, and a cache of this test's own."""
    monkeypatch.setattr(json_lines, "TARGET", 400)
    monkeypatch.setenv("SPARTITO_CACHE", str(tmp_path / "cache"))


def ys(data: Dataset, seed: int = 1) -> list[int]:
    return [int(y) for batch in Loader(data.batch(6), seed=seed) for y in batch.data]


def halves(where: Any, **options: Any) -> tuple[list[int], list[int]]:
    """The examples of both subsets."""
    found = [
        ys(sp.data.packed(where, "y", validation_split=0.3, subset=subset, **options))
        for subset in ("training", "validation")
    ]
    return found[0], found[1]


@pytest.mark.parametrize("key", [None, "y", "text"])
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_each_example_is_on_one_side_and_stays_there(
    format: str, key: str | None, tmp_path: Path
) -> None:
    write_all(tmp_path / "data", format, (200, 100))
    training, validation = halves(tmp_path / "data", key=key)
    assert sorted(training + validation) == list(range(300))
    assert 60 < len(validation) < 120
    assert training == sorted(training)
    assert halves(tmp_path / "data", key=key) == (training, validation)
    assert halves(tmp_path / "data", key=key, seed=2)[1] != validation
    write = write_parquet if format == "parquet" else write_lines
    write(tmp_path / "data" / f"more.{format}", range(300, 400))
    assert {*validation} == {y for y in halves(tmp_path / "data", key=key)[1] if y < 300}


def test_equal_keys_are_on_one_side(tmp_path: Path) -> None:
    table = pa.table({"y": list(range(300)), "patient": [f"p{y % 30}" for y in range(300)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    training, validation = halves(tmp_path / "a.parquet", key="patient")
    assert not {y % 30 for y in training} & {y % 30 for y in validation}
    assert len(validation) % 10 == 0


def test_what_rules_keep_is_read_in_an_order_of_its_own(tmp_path: Path) -> None:
    write_all(tmp_path / "data", "parquet", (50, 30, 41))
    rules = {"y": lambda y: y % 3 == 0 and y > 20, "text": lambda text: text != "text 60"}
    data = sp.data.packed(tmp_path / "data", "y", where=rules)
    expected = [y for y in range(121) if y % 3 == 0 and y > 20 and y != 60]
    assert ys(data) == expected
    shuffled = data.shuffle(blocks=3)
    whole = ys(shuffled)
    assert sorted(whole) == expected
    assert whole != expected
    loaders = [Loader(shuffled.batch(6), (n, 3), seed=1) for n in range(3)]
    assert [
        int(y) for step in zip(*loaders, strict=True) for batch in step for y in batch.data
    ] == whole


def test_blocks_of_which_nothing_is_kept_are_not_fetched(tmp_path: Path) -> None:
    write_all(tmp_path / "data", "parquet", (200,))
    with serving(tmp_path / "data") as server:
        url = f"{server.url}/part-000.parquet"
        data = sp.data.packed(url, ("text", "y"), where={"y": lambda y: 55 < y < 62})
        server.ranges.clear()
        batches = list(Loader(data.batch(4), seed=1))
        assert [text for batch in batches for text in batch.data[0]] == [
            f"text {y}" for y in range(56, 62)
        ]
        assert len(server.ranges) <= 2


def test_a_corrupt_example_is_named(tmp_path: Path) -> None:
    lines = [f'{{"y": {y}}}' if y % 4 else '{"y": null}' for y in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = sp.data.packed(tmp_path / "a.jsonl", "y", validation_split=0.5, subset="training")
    source = data.source
    assert isinstance(source, ChosenSource)
    found = source.read_batch(range(len(source)))
    assert [index for index, _ in found.corrupt] == [
        n for n, at in enumerate(source.indices) if at % 4 == 0
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"validation_split": 0.1}, "must come together"),
        ({"validation_split": 1.5, "subset": "training"}, "not between 0 and 1"),
        ({"key": "y"}, "without a split"),
        ({"validation_split": 0.1, "subset": "training", "key": "tokens"}, "has a ndarray"),
        ({"validation_split": 0.1, "subset": "training", "key": "z"}, "'z'"),
        ({"where": {"z": bool}}, "'z'"),
        ({"where": {"y": lambda y: y > 9999}}, "is left"),
        ({"where": {"y": lambda y: y["a"]}}, "fails for 0"),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_all(tmp_path / "data", "parquet", (50,))
    with pytest.raises(UserError, match=words):
        sp.data.packed(tmp_path / "data", "y", **options)


def test_a_folder_of_images_is_the_same_here_and_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    from spartito.data.images import labelled
    from spartito.storage.files import LocalFiles

    generator = np.random.default_rng(0)
    for name in ("b/2.png", "b/10.png", "a/x/1.png", "a/x.png", "a/y/.hidden.png", "a/z.txt"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 255, (9, 9, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / name, "png")
    (tmp_path / "photos" / "b" / "bad.jpg").write_bytes(b"no image")
    (tmp_path / "photos" / "b" / "empty.jpg").write_bytes(b"")

    class Elsewhere(LocalFiles):
        local = False

    monkeypatch.setattr(labelled, "open_files", lambda url: Elsewhere(str(tmp_path / "photos")))
    here = sp.data.image_folder(tmp_path / "photos", (4, 4)).shuffle(3).batch(2)
    there = sp.data.image_folder("s3://bucket/photos", (4, 4)).shuffle(3).batch(2)
    assert there.classes == here.classes == ("a", "b")
    for _ in range(2):  # the second time nothing is fetched
        for one, other in zip(Loader(here), Loader(there), strict=True):
            assert all((a == b).all() for a, b in zip(one.data, other.data, strict=True))
        shutil.rmtree(tmp_path / "gone", ignore_errors=True)
        Elsewhere.read = None  # type: ignore[assignment, method-assign]
