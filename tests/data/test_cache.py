"""Decoded images that are kept: the same samples, whatever happens to the files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from spartito.data.dataset import Dataset
from spartito.data.images import cache, decode
from spartito.data.images import image_source as images
from spartito.data.images.cache import DirectoryCache
from spartito.data.images.image_source import ImageFolder, image_folder_source
from spartito.data.reading.loader import Loader
from spartito.data.sets.folders import image_folder
from spartito.errors import UserError
from tests.processes import context

SIZE = (9, 7)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Fourteen noisy pictures of two classes, of several sizes and formats, two of them broken."""
    random = np.random.default_rng(0)
    for number in range(14):
        pixels = random.integers(0, 256, (20 + number, 30, 3), dtype=np.uint8)
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.{'jpg' if number % 3 else 'png'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    (tmp_path / "photos" / "a" / "2.jpg").write_bytes(b"no image")
    (tmp_path / "photos" / "b" / "11.jpg").write_bytes(b"")
    return tmp_path / "photos"


def chain(folder: Path, where: Any = None, **options: Any) -> Dataset:
    made = image_folder(folder, SIZE, cache=where, **options)
    return made.shuffle(3).batch(5)


def epochs(dataset: Dataset, count: int = 2, shard: tuple[int, int] = (0, 1)) -> list[Any]:
    loader = Loader(dataset, shard)
    return [[(b.offsets, b.size, b.data) for b in loader] for _ in range(count)]


def assert_same(left: list[Any], right: list[Any]) -> None:
    assert len(left) == len(right)
    for ours, theirs in zip(left, right, strict=True):
        assert len(ours) == len(theirs)
        for (offsets, size, data), (their_offsets, their_size, their) in zip(
            ours, theirs, strict=True
        ):
            assert (offsets.tolist(), size) == (their_offsets.tolist(), their_size)
            for part, other in zip(data, their, strict=True):
                assert torch.equal(part, other)
                assert part.dtype == other.dtype


def one_by_one(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A map that changes nothing, which keeps batches from being read as a whole."""
    return x, y


@pytest.mark.parametrize("color", ["rgb", "grayscale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_batches_are_those_of_single_examples(folder: Path, color: str, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"color": color, "dtype": dtype}
    single = image_folder(folder, SIZE, **options).map(one_by_one)
    assert_same(epochs(chain(folder, **options)), epochs(single.shuffle(3).batch(5)))


@pytest.mark.parametrize("shard", [(0, 1), (1, 2)])
@pytest.mark.parametrize("where", ["memory", "directory"])
def test_a_cache_changes_no_sample(
    folder: Path, tmp_path: Path, where: str, shard: tuple[int, int]
) -> None:
    kept = where if where == "memory" else tmp_path / "kept"
    wanted = epochs(chain(folder), shard=shard)
    assert sum(len(y) for _, _, (_, y) in epochs(chain(folder), 1)[0]) == 12
    assert_same(epochs(chain(folder, kept), shard=shard), wanted)
    assert_same(epochs(chain(folder, kept), shard=shard), wanted)


def refuse(*_: object) -> Any:
    raise AssertionError("decoded again")


@pytest.mark.parametrize("where", ["memory", "directory"])
def test_the_second_epoch_decodes_nothing(
    folder: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a" / "2.jpg").unlink()
    (folder / "b" / "11.jpg").unlink()
    data = chain(folder, where if where == "memory" else tmp_path / "kept")
    first = epochs(data, 1)
    monkeypatch.setattr(cache, "pixels_of", refuse)
    assert_same(epochs(data, 1), first)
    if where == "directory":  # a later run
        assert_same(epochs(chain(folder, tmp_path / "kept"), 1), first)
        with pytest.raises(AssertionError, match="decoded again"):
            epochs(chain(folder, tmp_path / "kept", color="grayscale"), 1)


@pytest.mark.parametrize("where", ["memory", "directory"])
def test_a_changed_file_is_decoded_again(folder: Path, tmp_path: Path, where: str) -> None:
    data = chain(folder, where if where == "memory" else tmp_path / "kept")
    epochs(data, 1)
    for path in (folder / "a" / "0.png", folder / "a" / "2.jpg"):  # the second was no image
        Image.new("RGB", (8, 8), (1, 2, 3)).save(path)
    (folder / "a" / "4.jpg").write_bytes(b"broken now")
    (folder / "b" / "1.jpg").unlink()
    assert_same(epochs(data, 1), epochs(chain_of(data, folder), 1))


def chain_of(data: Dataset, folder: Path) -> Dataset:
    """The data set of ``data`` without a cache, with files that are gone by now too."""
    source = data.source
    assert isinstance(source, ImageFolder)
    plain = cache.Decoding(SIZE, "rgb")
    kept = ImageFolder(source.classes, source.paths, source.labels, plain, source.dtype)
    return Dataset(kept).shuffle(3).batch(5)


def test_a_file_that_changes_while_it_is_read_is_not_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "a" / "0.png"
    real = decode.pixels_of

    def change(*given: Any) -> Any:
        found = real(*given)
        Image.new("RGB", (8, 8), (9, 9, 9)).save(path)
        return found

    for where in ("memory", tmp_path / "kept"):
        source = image_folder_source(folder, SIZE, cache=where)
        monkeypatch.setattr(cache, "pixels_of", change)
        source.read(str(path))
        monkeypatch.setattr(cache, "pixels_of", real)
        assert source.read(str(path)).max() == 9


def entries(kept: Path) -> list[Path]:
    return sorted(path for path in kept.rglob("*") if path.is_file())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("damage", [cut, flip, zeros, Path.unlink])
def test_a_damaged_entry_is_none(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    wanted = epochs(chain(folder), 1)
    epochs(chain(folder, tmp_path / "kept"), 1)
    whole = {path: path.read_bytes() for path in entries(tmp_path / "kept")}
    assert len(whole) == 12
    for path in whole:
        damage(path)
    assert_same(epochs(chain(folder, tmp_path / "kept"), 1), wanted)
    assert {path: path.read_bytes() for path in entries(tmp_path / "kept")} == whole


def fill(folder: Path, kept: Path, rounds: int) -> None:
    """Empty and fill a cache again and again, as another replica's crash would."""
    wanted = epochs(chain(folder), 1)
    for number in range(rounds):
        assert_same(epochs(chain(folder, kept), 1), wanted)
        for path in entries(kept)[number % 3 :: 3]:
            path.unlink(missing_ok=True)


def test_replicas_fill_one_directory_at_the_same_time(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    others = [context.Process(target=fill, args=(folder, kept, 30)) for _ in range(2)]
    try:
        for process in others:
            process.start()
        for process in others:
            process.join(60)
        assert [process.exitcode for process in others] == [0, 0]
    finally:
        for process in others:
            process.kill()
            process.join()


def test_memory_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "available_memory", lambda: 10_000.0)  # 8,000 of them for caches
    held = chain(folder, "memory")
    epochs(held, 1)  # 12 of 14 images are there, and count no more
    second, third = chain(folder, "memory"), chain(folder, "memory")
    with pytest.raises(
        UserError, match=r"14 images of 9x7x3 bytes .* is 2\.6 kB; it may take 2\.3 kB"
    ):
        chain(folder, "memory")
    del second, third
    chain(folder, "memory")


def test_memory_counts_all_replicas_of_the_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "available_memory", lambda: 1e4)
    monkeypatch.setattr(images, "replicas_here", lambda: 4)
    with pytest.raises(UserError, match=r"on each of 4 replicas.*is 10\.6 kB"):
        chain(folder, "memory")


def test_the_disk_is_bounded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept"
    full = chain(folder, kept)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 1000))
    with pytest.raises(UserError, match="14 images of 9x7x3 bytes"):
        chain(folder, kept)
    epochs(full, 1)
    (folder / "a" / "2.jpg").unlink()
    (folder / "b" / "11.jpg").unlink()
    chain(folder, kept)  # what is there needs no more of the disk
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file' cannot be made: "):
        chain(folder, tmp_path / "file")


def test_a_disk_that_is_full_ends_nothing(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = epochs(chain(folder), 2)

    def full(*_: object) -> bytes:
        raise OSError(28, "No space left on device")

    data = chain(folder, tmp_path / "kept")
    monkeypatch.setattr(cache, "_head", full)
    monkeypatch.setattr(DirectoryCache, "_load", lambda *_: None)
    assert_same(epochs(data, 2), wanted)
    assert sum("takes no more" in message for message in caplog.messages) == 1
    assert entries(tmp_path / "kept") == []


def test_threads_are_the_cores_of_a_replica(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spartito.data.reading import prefetch

    monkeypatch.setattr(prefetch, "available_cores", lambda: 12)
    for replicas, threads in ((1, 12), (4, 3), (20, 1)):
        monkeypatch.setattr(prefetch, "replicas_here", lambda: replicas)  # noqa: B023
        data = image_folder(folder, SIZE)
        assert (data.threads, data.ahead) == (threads, threads + 2)
    monkeypatch.setattr(prefetch, "available_cores", lambda: 2000)
    assert image_folder(folder, SIZE).threads == prefetch.MOST_THREADS
