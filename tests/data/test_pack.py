"""Packing: what was packed is what was there, whoever is killed while doing it."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import spartito as sp
from spartito.cli.app import main
from spartito.data.blocks.manifest import NAME
from spartito.data.packing import pack as packing
from spartito.data.packing import sources
from spartito.data.packing.columns import keys_of
from spartito.data.packing.command import main_pack
from spartito.data.packing.pack import make_plan
from spartito.data.reading.loader import Loader
from spartito.data.tools.info import main_info
from spartito.errors import UserError
from spartito.failpoints import ENV
from tests.commands import commands_in
from tests.data.packed_files import WRITERS, names, tokens, write_all, write_tar
from tests.data.web_server import serving

COUNT = 40
SIZES = (23, 1, 40, 17)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of this test's own; the manifest says after each shard that it is done."""
    monkeypatch.setattr(packing, "RECORD_SECONDS", 0.0)
    monkeypatch.setenv("SPARTITO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two classes of small images, three of which are broken."""
    random = np.random.default_rng(3)
    for number in range(COUNT):
        folder = tmp_path / "images" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    (tmp_path / "images" / "cat" / "0.png").write_bytes(b"")
    (tmp_path / "images" / "dog" / "1.png").write_bytes(b"no image")
    whole = (tmp_path / "images" / "cat" / "2.png").read_bytes()
    (tmp_path / "images" / "cat" / "2.png").write_bytes(whole[:-20])
    return tmp_path / "images"


def packed(source: Path | str, out: Path, *format: str, **options: Any) -> dict[str, bytes]:
    """What is in a folder after packing into it."""
    assert main_pack(str(source), str(out), *format, **options) == 0
    return content(out)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def facts(folder: Path) -> Any:
    return json.loads((folder / NAME).read_text())


def examples(data: sp.data.Dataset) -> dict[bytes, int]:
    """The examples ``(x, y)`` of a data set, whatever their order."""
    found: dict[bytes, int] = {}
    for x, y in (batch.data for batch in Loader(data.skip_corrupt(5).batch(8))):
        found |= {row.numpy().tobytes(): int(label) for row, label in zip(x, y, strict=True)}
    return found


@pytest.mark.parametrize("format", ["parquet", "webdataset"])
def test_a_packed_folder_of_images_has_what_the_folder_has(
    format: str, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    files = packed(images, out, format, shard_size="4kB")
    assert len(files) > 4
    assert "3 left out" in (said := capsys.readouterr().out)
    assert "left out: dog/1.png (not_an_image: " in said
    data = sp.data.packed(out, image_size=(12, 16))
    folder = sp.data.image_folder(images, (12, 16))
    assert data.classes == folder.classes == ("cat", "dog")
    assert examples(data) == examples(folder)
    keys = sp.data.packed(out, ("key", "label"))
    assert len(keys) == facts(out)["examples"] == COUNT - 3
    seen = [(key, int(y)) for keys, y in keys.batch(8) for key, y in zip(keys, y, strict=True)]
    assert sorted(seen)[0] == ("cat/10", 0)
    assert [y for _, y in seen] != sorted(y for _, y in seen)  # shuffled
    cats = sp.data.packed(out, "label", where={"label": lambda y: y == 0})
    assert {int(y) for y in cats} == {0}
    halves = [
        {*sp.data.packed(out, "key", validation_split=0.5, subset=half, key="key")}
        for half in ("training", "validation")
    ]
    assert halves[0] | halves[1] == {key for key, _ in seen}
    assert not halves[0] & halves[1]
    assert packed(images, out, format, shard_size="4kB") == files  # again: nothing to do


def test_other_readers_read_it(images: Path, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    packed(images, tmp_path / "a", keep_order=True)
    table = pq.read_table(tmp_path / "a" / "part-00000.parquet")
    assert table.column("label").to_pylist() == sorted(table.column("label").to_pylist())
    assert table.column("image")[0].as_py() == (images / "cat" / "10.png").read_bytes()
    packed(images, tmp_path / "b", "webdataset")
    with tarfile.open(tmp_path / "b" / "part-00000.tar") as tar:
        assert {name.partition(".")[2] for name in tar.getnames()} == {"png", "cls"}


@pytest.mark.parametrize(("format", "kills"), [("parquet", (1, 4)), ("webdataset", (3,))])
def test_killed_anywhere_it_goes_on_to_the_same_bytes(
    format: str, kills: tuple[int, ...], images: Path, tmp_path: Path
) -> None:
    options = ("--format", format, "--shard-size", "4kB")
    expected = packed(images, tmp_path / "whole", format, shard_size="4kB")
    out = tmp_path / "out"
    with commands_in(tmp_path) as commands:
        for renames in kills:
            env = {ENV: f"storage.file.before_rename:kill:{renames}"}
            ended = commands.spartito("data", "pack", images, out, *options, env=env)
            assert ended.code == -9
            if renames > 1:
                with pytest.raises(UserError, match="still being packed"):
                    sp.data.packed(out)
    assert packed(images, out, format, shard_size="4kB") == expected


@pytest.mark.parametrize("is_recorded", [True, False])
def test_shards_that_are_done_are_not_made_again(
    is_recorded: bool, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    expected = packed(images, out, shard_size="4kB")
    whole = facts(out)
    lost = whole["shards"].pop(1)["name"]  # and what was left out of it
    (out / lost).unlink()
    if not is_recorded:  # else somebody has removed the file
        (out / NAME).write_text(json.dumps({**whole, "whole": False}))
    read: list[int] = []
    rows = sources.FolderSource.rows

    def noted(self: Any, some: Any) -> Any:
        read.extend(some)
        return rows(self, some)

    monkeypatch.setattr(sources.FolderSource, "rows", noted)
    assert packed(images, out, shard_size="4kB") == expected
    assert 0 < len(read) < COUNT / 2


def test_nothing_of_the_users_is_replaced(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(out: Path, said: str, *format: str, **options: Any) -> None:
        assert main_pack(str(images), str(out), *format, **options) == 2
        assert said in capsys.readouterr().err

    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    refused(mine, "holds other files, as 'notes.txt'")
    refused(mine / "notes.txt", "cannot be written: File exists")
    assert content(mine) == {"notes.txt": b"mine"}
    refused(images / "new", "lies inside of")
    out = tmp_path / "out"
    before = packed(images, out)
    refused(out, "order 0, size 64000000; now it is order 1, size 1000", seed=1, shard_size="1kB")
    refused(out, "now it is format webdataset", "webdataset")
    (images / "cat" / "10.png").write_bytes(b"another")
    refused(out, "holds packed data of files ")
    assert content(out) == before
    # a file of the user's that has the name of a shard
    packed(images, tmp_path / "next")
    whole = facts(tmp_path / "next")
    (tmp_path / "next" / NAME).write_text(json.dumps({**whole, "whole": False, "shards": []}))
    (tmp_path / "next" / "part-00000.parquet").write_text("mine")
    refused(tmp_path / "next", "has another content than what is packed now")
    assert (tmp_path / "next" / "part-00000.parquet").read_text() == "mine"


def test_what_cannot_be_is_refused(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(source: Path | str, said: str, **options: Any) -> None:
        assert main_pack(str(source), str(tmp_path / "out"), **options) == 2
        assert said in capsys.readouterr().err

    refused(images, "is not written", format="parket")
    refused(images, "holds bytes, which JSON has not", format="jsonl")
    refused(images, "is not a number of bytes", shard_size="big")
    refused(images, "of a folder of images", columns=("image",))
    refused(tmp_path / "nothing", "does not exist")
    write_tar(tmp_path / "twice.tar", [1, 2, 1])
    refused(tmp_path / "twice.tar", "two examples have the key", format="webdataset")
    refused(tmp_path / "twice.tar", "which is no folder of images", keep_corrupt=True)
    (tmp_path / "mixed.jsonl").write_text('{"y": 1}\n{"y": "two"}\n{"z": {}}\n')
    refused(tmp_path / "mixed.jsonl", "is not int64 in all of them", columns=("y",))
    refused(tmp_path / "mixed.jsonl", "as in the first", columns=("y",), format="webdataset")
    (tmp_path / "objects.jsonl").write_text('{"y": {"a": 1}}\n')
    refused(tmp_path / "objects.jsonl", "holds objects")
    for path in images.rglob("*.png"):
        path.write_bytes(b"")
    refused(images, "none of 40 examples can be read")


@pytest.mark.parametrize("format", list(WRITERS))
def test_a_packed_set_becomes_another(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("json_lines", "mds", "tars"):
        monkeypatch.setattr(f"spartito.data.blocks.{module}.TARGET", 400)
    monkeypatch.setattr(sources, "ALIVE", 1200)
    write_all(tmp_path / "data", format, SIZES)
    columns = names(format, "tokens", "y", "text")
    for number, kind in enumerate(("parquet", "webdataset", "jsonl")):
        out = tmp_path / kind
        packed(tmp_path / "data", out, kind, shard_size="2kB", seed=number)
        seen = []
        for x, y, text in sp.data.packed(out, columns).batch(8):
            for row, label, words in zip(x, y.tolist(), text, strict=True):
                assert row.tolist() == tokens(label).tolist()
                assert words == f"text {label}"
                seen.append(label)
        assert sorted(seen) == list(range(sum(SIZES)))
        assert seen != sorted(seen)
        assert len(facts(out)["shards"]) > 1
        windows = sp.data.tokens(out, 7, columns[0])
        assert sorted(int(x[0]) for x, _ in windows)[:3] == [0, 1, 2]


def test_values_that_are_absent_stay_so_and_damaged_ones_are_left_out(tmp_path: Path) -> None:
    lines = ['{"a": 1, "b": "x"}', '{"a": null, "b": "y"}', "no JSON", '{"a": 3, "b": null}']
    (tmp_path / "some.jsonl").write_text("\n".join(lines))
    for format in ("parquet", "webdataset", "jsonl"):
        out = tmp_path / format
        packed(tmp_path / "some.jsonl", out, format, keep_order=True)
        assert facts(out)["examples"] == 3
        assert "line that is no JSON" in facts(out)["left_out"][0]["why"]
        found = [batch.data.tolist() for batch in Loader(sp.data.packed(out, "a").batch(4))]
        assert found == [[1, 3]]


def test_over_a_network_and_into_a_store(images: Path, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    expected = packed(images, tmp_path / "here")
    with serving(tmp_path / "here") as server:
        data = sp.data.packed(server.url, image_size=(12, 16))  # no listing: the manifest names it
        assert examples(data) == examples(sp.data.packed(tmp_path / "here", image_size=(12, 16)))
        packed(server.url, tmp_path / "there", "webdataset")
        assert facts(tmp_path / "there")["classes"] == ["cat", "dog"]
    url = f"memory://{tmp_path.name}"
    for _ in range(2):
        assert main_pack(str(images), url) == 0
        store = fsspec.filesystem("memory")
        found = {name.rpartition("/")[2]: store.cat(name) for name in store.find(url[8:])}
        assert found == expected
    assert len(sp.data.packed(url, "label")) == COUNT - 3
    for path in images.rglob("*.png"):
        store.pipe(f"/photos/{path.relative_to(images)}", path.read_bytes())
    again = packed("memory://photos", tmp_path / "again")
    assert main_info("memory://photos") == 0
    assert main(["data", "check", "memory://photos"]) == 2
    assert main(["data", "bench", "memory://photos"]) == 2
    assert again["part-00000.parquet"] == expected["part-00000.parquet"]


def test_a_shard_of_another_size_is_named(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    packed(images, out, shard_size="4kB")
    with open(out / "part-00001.parquet", "ab") as file:
        file.write(b"more")
    with pytest.raises(UserError, match=r"part-00001.parquet has [\d,]+ bytes, its manifest says"):
        sp.data.packed(out)
    (out / "part-00001.parquet").unlink()
    with pytest.raises(UserError, match=r"part-00001.parquet' cannot be read"):
        sp.data.packed(out)
    for version, said in ((2, "has version 2"), (1, "no manifest of packed data")):
        (out / NAME).write_text(json.dumps({"version": version}))
        with pytest.raises(UserError, match=said):
            sp.data.packed(out)


def test_shards_are_about_equally_large() -> None:
    sizes = np.array([5, 1, 1, 1, 900, 1, 1, 40, 50])
    for count in (1, 2, 5, 9, 50):
        plan = make_plan(np.arange(9), sizes, 1000 // count, ".x")
        parts = [plan.indices(shard) for shard in range(len(plan))]
        assert [index for part in parts for index in part] == list(range(9))
        assert all(parts)
    even = make_plan(np.arange(1000), np.full(1000, 10), 1000, ".x")
    assert {len(even.indices(shard)) for shard in range(len(even))} == {100}


def test_keys() -> None:
    assert keys_of(["a/1.jpg", "a/2.b.jpg"]) == ["a/1", "a/2%2Eb"]
    assert keys_of(["a/1.jpg", "a/1.png"]) == ["a/1%2Ejpg", "a/1%2Epng"]
    assert keys_of([os.fsdecode(b"a/\xff.jpg")])[0].isascii()
