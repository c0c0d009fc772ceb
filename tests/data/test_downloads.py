"""Named data sets: fetched whole and right from a server of the tests, or not at all."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import spartito as sp
from spartito.data.sets import downloads
from spartito.data.sets.cifar import CLASSES, FOLDER, ROW
from spartito.data.sets.known_sets import KNOWN, KnownFile
from spartito.data.tools.get import main_get, main_list
from spartito.errors import UserError
from tests.data.web_server import WebServer, serving

Out = pytest.CaptureFixture[str]
TEXT = b"To be, or not to be: that is the question. " * 60


def idx(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    dims = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + dims + array.tobytes(), mtime=0)


def digits() -> dict[str, bytes]:
    random = np.random.default_rng(0)
    found = {}
    for split, count in (("train", 40), ("t10k", 12)):
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        found[f"{split}-images-idx3-ubyte.gz"] = idx(images)
        found[f"{split}-labels-idx1-ubyte.gz"] = idx(labels)
    return found


def cifar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
        for number, name in enumerate(names):
            rows = np.full((4, ROW), number, np.uint8)
            info = tarfile.TarInfo(f"{FOLDER}/{name}")
            info.size = rows.size
            tar.addfile(info, io.BytesIO(rows.tobytes()))
    return file.getvalue()


def pets() -> bytes:
    file, image = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (20, 10), (200, 100, 0)).save(image, "JPEG")
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("Cat/0.jpg", "Cat/1.jpg", "Dog/0.jpg"):
            archive.writestr(f"PetImages/{name}", image.getvalue())
        archive.writestr("CDLA-Permissive-2.0.pdf", b"terms")
    return file.getvalue()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """A server of small sets in the form of the real ones, whose checksums are expected."""
    monkeypatch.setenv("SPARTITO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(downloads, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(downloads, "CHUNK", 1000)
    contents = {
        **digits(),
        "cifar-10-binary.tar.gz": cifar(),
        "kagglecatsanddogs_5340.zip": pets(),
        "input.txt": TEXT,
    }
    (tmp_path / "home").mkdir()
    for name, data in contents.items():
        (tmp_path / "home" / name).write_bytes(data)
    with serving(tmp_path / "home") as server:
        for name, real in list(KNOWN.items()):
            files = tuple(
                KnownFile(each.name, len(data), hashlib.sha256(data).hexdigest())
                for each in real.files
                for data in [contents[each.name]]
            )
            monkeypatch.setitem(KNOWN, name, replace(real, files=files, homes=(server.url,)))
        yield server


def test_each_is_fetched_and_read_by_what_it_says(
    home: WebServer, tmp_path: Path, capsys: Out
) -> None:
    for name in KNOWN:
        assert main_get(name, tmp_path / "data", None) == 0
        folder, _, reads = capsys.readouterr().out.strip().partition("\nread it by ")
        assert folder == str(tmp_path / "data" / name)
        data = eval(reads, {"sp": sp})  # the line that users are told to type
        x, _ = next(iter(data.batch(2)))
        assert len(x) == 2
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == sorted(KNOWN)
    test = sp.data.cifar10(tmp_path / "data" / "cifar10", "test")
    assert (len(test), test.classes) == (4, CLASSES)
    x, y = list(test)[3]
    assert x.shape == (3, 32, 32)
    assert float(x.max()) == pytest.approx(5 / 255)
    assert int(y) == 5
    assert (tmp_path / "data" / "cats_vs_dogs" / "CDLA-Permissive-2.0.pdf").exists()
    requests = home.requests
    assert sp.data.get("mnist", tmp_path / "data") == tmp_path / "data" / "mnist"
    assert home.requests == requests
    (tmp_path / "data" / "cifar10" / FOLDER / "test_batch.bin").write_bytes(b"short")
    with pytest.raises(UserError, match="is no file of CIFAR-10"):
        sp.data.cifar10(tmp_path / "data" / "cifar10", "test")
    with pytest.raises(UserError, match="is not cifar10 as it was fetched"):
        sp.data.get("cifar10", tmp_path / "data")


def test_what_was_cut_off_goes_on_where_it_was(home: WebServer, tmp_path: Path) -> None:
    home.fault = lambda number: {1: "cut", 2: "500"}.get(number)
    folder = sp.data.get("tiny_shakespeare")
    assert folder == tmp_path / "cache" / "sets" / "tiny_shakespeare"
    assert (folder / "input.txt").read_bytes() == TEXT
    (_, start, _), *_ = home.ranges
    assert start >= len(TEXT) // 2
    # by another call, after one that gave up
    home.requests, home.fault = 0, lambda number: "cut" if number == 1 else "403"
    with pytest.raises(UserError, match=r"input.txt: 403 .*\n.*--mirror"):
        sp.data.get("tiny_shakespeare", tmp_path)
    assert not (tmp_path / "tiny_shakespeare").exists()
    home.fault = lambda number: None
    sp.data.get("tiny_shakespeare", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "home", "tiny_shakespeare"]


def test_what_is_not_as_its_checksum_says_never_appears(
    home: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.fault = lambda number: "changed"
    with pytest.raises(UserError, match=r"its SHA-256 is [0-9a-f]{64}, and should be"):
        sp.data.get("tiny_shakespeare", tmp_path)
    assert not (tmp_path / "tiny_shakespeare").exists()
    # half of it from a home that has another one: begun anew
    part = tmp_path / ".spartito-get-tiny_shakespeare" / "input.txt"
    part.write_bytes(b"x" * 100)
    home.fault = lambda number: None
    assert (sp.data.get("tiny_shakespeare", tmp_path) / "input.txt").read_bytes() == TEXT
    # the next home has it; so has a folder
    homes = (f"{home.url}/nothing", home.url)
    monkeypatch.setitem(KNOWN, "mnist", replace(KNOWN["mnist"], homes=homes))
    sp.data.get("mnist", tmp_path)
    shutil.move(tmp_path / "mnist", tmp_path / "mirror")
    requests = home.requests
    sp.data.get("mnist", tmp_path, mirror=str(tmp_path / "mirror"))
    assert home.requests == requests
    with pytest.raises(UserError, match="cannot be read: No such file"):
        sp.data.get("cifar10", tmp_path, mirror=str(tmp_path / "mirror"))


def test_of_many_that_ask_one_fetches(home: WebServer, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: sp.data.get("mnist", tmp_path), range(4)))
    assert found == [tmp_path / "mnist"] * 4
    assert set(home.ranges.values()) == {1}
    assert not (tmp_path / ".spartito-get-mnist").exists()


def test_nothing_of_the_users_is_replaced(home: WebServer, tmp_path: Path, capsys: Out) -> None:
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "mine").write_text("mine")
    assert main_get("mnist", tmp_path, None) == 2
    assert "is not mnist as it was fetched" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mnist").iterdir()] == ["mine"]
    assert main_get("minst", tmp_path, None) == 2
    assert "Did you mean 'mnist'?" in capsys.readouterr().err


def test_the_list(capsys: Out) -> None:
    assert main_list() == 0
    said = capsys.readouterr().out
    assert "825 MB" in said
    assert "licence: CC BY-SA 3.0" in said
    assert main_list(json=True) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {each["name"] for each in facts} == set(KNOWN)
    for each in KNOWN.values():
        assert all(len(file.sha256) == 64 for file in each.files)
