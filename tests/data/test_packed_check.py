"""``spartito data info`` and ``check`` of packed files: what they hold, what is wrong with it."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import spartito as sp
from spartito.cli.app import main
from spartito.data.blocks.manifest import NAME
from spartito.data.packing.command import main_pack
from spartito.data.tools.info import main_info
from spartito.data.tools.packed_check import main_packed_check
from tests.data.packed_files import WRITERS, write_all
from tests.data.web_server import serving

Out = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARTITO_CACHE", str(tmp_path / "cache"))


def image(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Packed images in three shards."""
    for number in range(30):
        folder = tmp_path / "images" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(image(number))
    out = tmp_path / "pets"
    assert main_pack(str(tmp_path / "images"), str(out), shard_size="5kB") == 0
    assert len(list(out.glob("*.parquet"))) > 2
    return out


def checked(url: Path | str, capsys: Out, code: int, **options: Any) -> tuple[str, Any]:
    """What a check prints, and its JSON."""
    capsys.readouterr()
    assert main_packed_check(str(url), json=True, **options) == code
    said, _, facts = capsys.readouterr().out.strip().rpartition("\n")
    return said, json.loads(facts)


def informed(url: Path | str, capsys: Out) -> tuple[str, Any]:
    capsys.readouterr()
    assert main_info(str(url)) == 0
    said = capsys.readouterr().out
    assert main_info(str(url), json=True) == 0
    return said, json.loads(capsys.readouterr().out)


def test_info_of_packed_images(pets: Path, tmp_path: Path, capsys: Out) -> None:
    said, facts = informed(pets, capsys)
    assert facts["examples"] == 30
    assert facts["classes"] == ["cat", "dog"]
    assert facts["columns"]["image"].startswith("image, as PNG 16x12, ")
    assert facts["cache"] is None
    assert "column label: int64" in said
    with serving(pets) as server:
        assert informed(server.url, capsys)[1]["cache"]["blocks"] == 1  # the first was looked at
        list(sp.data.packed(server.url, ("image", "label", "key"), image_size=(8, 8)).batch(8))
        _, facts = informed(server.url, capsys)
        assert facts["cache"]["blocks"] == facts["blocks"]
        assert facts["cache"]["folder"] == str(tmp_path / "cache")
    said, facts = informed(tmp_path / "images", capsys)
    assert facts["classes"] == {"cat": 15, "dog": 15}
    assert "classes: cat 15, dog 15" in said


@pytest.mark.parametrize("format", list(WRITERS))
def test_info_of_each_format(format: str, tmp_path: Path, capsys: Out) -> None:
    write_all(tmp_path / "data", format, (23, 17))
    said, facts = informed(tmp_path / "data", capsys)
    assert (facts["format"], facts["examples"], facts["files"]) == (format, 40, 2)
    assert "array (7,)" in said
    assert facts["memory"]["bytes"] > 40 * 28
    blocks = facts["memory"]["blocks"]
    assert f"memory of a task with shuffle(blocks={blocks}): about" in said
    assert main_info(str(tmp_path / "nothing")) == 2
    assert main_info(str(tmp_path / "data"), ("nothing",)) in (0, 2)


def test_a_good_set_is_good(pets: Path, capsys: Out) -> None:
    said, facts = checked(pets, capsys, 0)
    assert (facts["examples"], facts["bad"]) == (30, 0)
    assert said.endswith("0 bad")


def test_files_that_are_not_as_their_manifest_says(pets: Path, tmp_path: Path, capsys: Out) -> None:
    first, second, third, *_ = sorted(pets.glob("*.parquet"))
    first.write_bytes(first.read_bytes()[:-100])
    data = bytearray(second.read_bytes())
    data[data.index(b"IDAT") + 20] ^= 1  # of an image
    second.write_bytes(data)
    third.unlink()
    said, facts = checked(pets, capsys, 1)
    assert {fault["kind"]: fault["file"] for fault in facts["faults"]} == {
        "size": first.name,
        "unreadable": third.name,  # the last of two
        "checksum": second.name,
        "undecodable": second.name,
    }
    assert "is no whole Parquet file" in said
    assert "undecodable: part-00001.parquet, example 0 ('image': PNG chunk IDAT" in said
    assert checked(pets, capsys, 1, images=False)[1]["bad"] == facts["bad"] - 1
    whole = json.loads((pets / NAME).read_text())
    (pets / NAME).write_text(json.dumps({**whole, "whole": False}))
    assert main_packed_check(str(pets)) == 2


def test_what_training_would_skip_is_named(tmp_path: Path, capsys: Out) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = {
        "image": [image(0), b"no image", image(2), None],
        "x": [[1.0, 2.0], [3.0, 4.0], [float("nan"), 1.0], [0.0, 0.0]],
        "y": [0, 1, None, 3],
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    said, facts = checked(tmp_path / "a.parquet", capsys, 1)
    found = {(fault["example"], fault["kind"]) for fault in facts["faults"]}
    assert found == {(1, "not_an_image"), (2, "not_finite"), (2, "missing"), (3, "missing")}
    assert "missing: a.parquet, example 3 ('image' is null)" in said
    assert checked(tmp_path / "a.parquet", capsys, 1, columns=("y",))[1]["bad"] == 1
    assert main_packed_check(str(tmp_path / "a.parquet"), ("z",)) == 2
    lines = ['{"y": 1}', "no JSON", '{"y": 2, "x": [1, NaN]}']
    (tmp_path / "b.jsonl").write_text("\n".join(lines) + "\n")
    found = checked(tmp_path / "b.jsonl", capsys, 1)[1]["kinds"]
    assert found == {"damaged": 2, "missing": 1, "not_finite": 1}


def test_samples_of_one_name_in_a_tar(tmp_path: Path, capsys: Out) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("0.cls", "1.cls", "1.cls", "2.cls", "0.cls"):
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"7"))
    said, facts = checked(tmp_path / "a.tar", capsys, 1)
    assert facts["kinds"] == {"duplicate_key": 2}
    assert "duplicate_key: a.tar ('1.cls' is there twice)" in said
    (tmp_path / "b.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:1800])
    shutil.copy(tmp_path / "a.tar", tmp_path / "c.tar")
    found = checked(tmp_path / "*.tar", capsys, 1)[1]["faults"]
    assert [fault["file"] for fault in found if fault["kind"] == "unreadable"] == ["b.tar"]


def test_the_commands(pets: Path, tmp_path: Path, capsys: Out) -> None:
    images, out = str(tmp_path / "images"), str(tmp_path / "out")
    for code, *words in (
        (0, "info", str(pets)),
        (0, "check", str(pets), "--no-images", "--columns", "image, label"),
        (0, "check", images),
        (0, "pack", str(pets), out, "--format", "webdataset", "--keep-order", "--json"),
        (2, "pack", str(pets), out, "--seed", "1"),
        (0, "bench", out, "--seconds", "0.05", "--image-size", "8"),
        (0, "get"),
        (2, "get", "--to", out),
        (2, "check", str(pets), "--remove"),
        (2, "check", images, "--columns", "image"),
        (2, "bench", images, "--seconds", "0"),
    ):
        assert main(["data", *words]) == code, words
    said = capsys.readouterr()
    assert '"examples": 30' in said.out
    assert f"--remove of {pets}, which is packed files" in said.err


def test_texts_are_packed_files_where_no_images_are(tmp_path: Path, capsys: Out) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one")
    (tmp_path / "texts" / "b.txt").write_bytes(b"\xff")
    assert informed(tmp_path / "texts", capsys)[1]["format"] == "text"
    assert checked(tmp_path / "texts", capsys, 1)[1]["kinds"] == {"damaged": 1}
    assert main_pack(str(tmp_path / "texts"), str(tmp_path / "out"), "jsonl") == 0
    assert list(sp.data.packed(tmp_path / "out", "text")) == ["one"]


def test_over_a_network(pets: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    monkeypatch.setattr("spartito.storage.files.PAUSES", (0.0,))
    with serving(pets) as server:
        assert checked(server.url, capsys, 0)[1]["examples"] == 30
        (pets / "part-00001.parquet").unlink()
        assert checked(server.url, capsys, 1)[1]["kinds"] == {"unreadable": 1}
        server.fault = lambda number: "500" if number > 3 else None
        assert main_packed_check(server.url) == 2  # says nothing of the data
