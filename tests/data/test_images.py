"""Images on disk as samples: what a folder holds, how it is split, what a file becomes."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from spartito.data.images.image_source import (
    ImageFolder,
    image_folder_source,
    read_image,
    split_order,
)
from spartito.data.images.walk import image_files
from spartito.errors import CorruptSampleError, UserError
from tests.skips import skip_if


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> NDArray[np.uint8]:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (height, width, channels), dtype=np.uint8)


def smooth(height: int, width: int) -> Image.Image:
    """A picture without fine detail, that resizing and JPEG change little."""
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    values = np.stack([200 * x, 200 * y, 100 + 100 * x * y], axis=2)
    return Image.fromarray(values.astype(np.uint8))


def save(path: Path, pixels: NDArray[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Three classes with 5, 4 and 2 images of several sizes, in an order that is not sorted."""
    for name, number in (("dog", 4), ("cat", 5), ("zebra", 2)):
        for i in reversed(range(number)):
            pixels = noise(20 + i, 30 - i, seed=i)
            save(tmp_path / "pets" / name / f"{i}.png", pixels)
    return tmp_path / "pets"


def names(source: ImageFolder, root: Path) -> list[str]:
    return [Path(path).relative_to(root).as_posix() for path in source.paths]


def test_classes_files_and_labels_are_sorted(pets: Path) -> None:
    source = image_folder_source(pets, (12, 16))
    assert source.classes == ("cat", "dog", "zebra")
    assert names(source, pets) == (
        [f"cat/{i}.png" for i in range(5)]
        + [f"dog/{i}.png" for i in range(4)]
        + [f"zebra/{i}.png" for i in range(2)]
    )
    assert source.labels == (0,) * 5 + (1,) * 4 + (2,) * 2
    assert [int(y) for _, y in (source[i] for i in range(len(source)))] == list(source.labels)


def test_a_sample_is_a_view_of_rows_of_pixels(pets: Path) -> None:
    x, y = image_folder_source(pets, (12, 16))[7]
    assert (x.shape, x.dtype) == ((3, 12, 16), torch.float32)
    assert x.stride() == (1, 48, 3)
    batch = torch.stack([x.permute(1, 2, 0)] * 2).permute(0, 3, 1, 2)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert (y.shape, y.dtype, int(y)) == ((), torch.int64, 1)


def test_pixels_of_the_wanted_size_are_the_files_own(tmp_path: Path) -> None:
    pixels = noise(12, 16)
    path = save(tmp_path / "a.png", pixels)
    x = read_image(path, (12, 16))
    assert np.array_equal(x.permute(1, 2, 0).numpy(), pixels.astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8])
def test_every_dtype_holds_the_same_values(tmp_path: Path, dtype: torch.dtype) -> None:
    path = save(tmp_path / "a.png", noise(6, 4))
    x = read_image(path, (6, 4), dtype=dtype)
    assert x.dtype == dtype
    assert torch.equal(x.float(), read_image(path, (6, 4)))  # 8 bits of mantissa hold 0 to 255


def test_grayscale(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", noise(6, 4))
    x = read_image(path, (6, 4), color="grayscale")
    assert x.shape == (1, 6, 4)
    weights = torch.tensor([0.299, 0.587, 0.114]).reshape(3, 1, 1)
    assert torch.allclose(x, (read_image(path, (6, 4)) * weights).sum(0, keepdim=True), atol=1)


def test_16_bits_become_8_by_their_upper_byte(tmp_path: Path) -> None:
    deep = (np.arange(24, dtype=np.uint16) * 2_700).reshape(4, 6)
    path = save(tmp_path / "a.png", deep)
    x = read_image(path, (4, 6))
    assert np.array_equal(x[1].numpy(), (deep >> 8).astype(np.float32))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA"])
def test_every_mode_becomes_three_channels(tmp_path: Path, mode: str) -> None:
    smooth(12, 16).convert(mode).save(tmp_path / "a.png")
    x = read_image(tmp_path / "a.png", (12, 16))
    assert x.shape == (3, 12, 16)
    assert float(x.amax() - x.amin()) > 100


@pytest.mark.parametrize("size", [(375, 500), (1800, 2400), (180, 180), (60, 90)])
def test_a_jpeg_of_any_size_is_resized_alike(tmp_path: Path, size: tuple[int, int]) -> None:
    picture = smooth(*size)
    picture.save(tmp_path / "a.jpg", quality=95)
    wanted = np.asarray(picture.resize((180, 180), Image.Resampling.BILINEAR), dtype=np.float32)
    x = read_image(tmp_path / "a.jpg").permute(1, 2, 0).numpy()
    assert np.abs(x - wanted).max() < 6
    assert np.abs(x - wanted).mean() < 1


def test_image_size_is_height_then_width(tmp_path: Path) -> None:
    smooth(375, 500).save(tmp_path / "a.jpg")
    assert read_image(tmp_path / "a.jpg", (20, 70)).shape == (3, 20, 70)


def test_exif_orientation_is_not_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    smooth(40, 60).save(tmp_path / "turned.jpg", exif=exif)
    smooth(40, 60).save(tmp_path / "plain.jpg")
    turned, plain = (read_image(tmp_path / f"{n}.jpg", (40, 60)) for n in ("turned", "plain"))
    assert torch.equal(turned, plain)


def test_cmyk_and_wrongly_named_files_are_read_all_the_same(tmp_path: Path) -> None:
    smooth(40, 60).convert("CMYK").save(tmp_path / "cmyk.jpg", quality=95)
    smooth(40, 60).save(tmp_path / "named.jpg", "PNG")
    cmyk, named = (read_image(tmp_path / f"{n}.jpg", (40, 60)) for n in ("cmyk", "named"))
    assert float((cmyk - named).abs().mean()) < 6


def jpeg_cut(path: Path) -> None:
    smooth(375, 500).save(path)
    path.write_bytes(path.read_bytes()[:-200])


def png_cut(path: Path) -> None:
    smooth(375, 500).save(path, "PNG")
    path.write_bytes(path.read_bytes()[:-12])


def bomb(path: Path) -> None:
    Image.new("1", (10_000, 10_000)).save(path, "PNG")


CORRUPT: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "there is no image"),
    "empty": (lambda path: path.touch(), "0 bytes"),
    "text": (lambda path: path.write_text("hello"), "no image header, starts with b'hello'"),
    "folder": (lambda path: path.mkdir(), "not a regular file"),
    "cut": (jpeg_cut, "no end marker"),
    "cut_png": (png_cut, "no end chunk"),
    "bomb": (bomb, "decompression bomb"),
    "tiff": (lambda path: smooth(9, 9).save(path, "TIFF"), "TIFF is not a format that is read"),
}


@pytest.mark.parametrize("kind", CORRUPT)
def test_a_corrupt_file_is_named_with_the_reason(tmp_path: Path, kind: str) -> None:
    make, reason = CORRUPT[kind]
    path = tmp_path / "a.jpg"
    make(path)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(CorruptSampleError) as error:
            read_image(path)
    assert str(path) in str(error.value)
    assert reason in str(error.value)
    assert seen == []


def test_broken_exif_warns_nobody_on_any_thread(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    smooth(40, 60).save(tmp_path / "a.jpg", exif=exif)
    data = bytearray((tmp_path / "a.jpg").read_bytes())
    del data[2 : 4 + int.from_bytes(data[4:6], "big")]  # JFIF's segment, so that Exif's is asked
    start = data.index(b"Exif\0\0") + 14
    data[start : start + 2] = b"\xff\xff"
    (tmp_path / "a.jpg").write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning), Image.open(tmp_path / "a.jpg") as image:
            image.load()  # the file does make Pillow warn
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start_together = threading.Barrier(8, timeout=30)

        def read(_: int) -> torch.Tensor:
            start_together.wait()
            return read_image(tmp_path / "a.jpg")

        with ThreadPoolExecutor(8) as pool:
            images = list(pool.map(read, range(8)))
    assert all(torch.equal(image, images[0]) for image in images)


def test_a_corrupt_file_spoils_no_other_sample(pets: Path) -> None:
    (pets / "cat" / "1.png").write_bytes(b"")
    source = image_folder_source(pets, (12, 16))
    with pytest.raises(CorruptSampleError, match=r"cat/1\.png"):
        source[1]
    assert source[0][0].shape == source[2][0].shape == (3, 12, 16)


splits = st.floats(0.01, 0.99)
seeds = st.integers(0, 2**32)


@given(st.integers(0, 300), splits, seeds)
def test_the_two_parts_of_a_split_make_the_whole(count: int, split: float, seed: int) -> None:
    training = split_order(count, split, "training", seed)
    validation = split_order(count, split, "validation", seed)
    assert len(validation) == int(split * count)
    assert sorted([*training, *validation]) == list(range(count))
    assert np.array_equal(training, split_order(count, split, "training", seed))


@given(st.integers(50, 300), splits, seeds)
def test_the_order_depends_on_the_seed_and_not_on_the_split(
    count: int, split: float, seed: int
) -> None:
    def order(split: float, seed: int) -> list[int]:
        return [
            *split_order(count, split, "training", seed),
            *split_order(count, split, "validation", seed),
        ]

    assert order(split, seed) == order(0.5, seed)
    assert order(split, seed) != order(split, seed + 1)


def test_the_split_is_the_same_for_ever() -> None:
    assert split_order(10, 0.3, "training", 1337).tolist() == [5, 1, 6, 7, 8, 4, 0]
    assert split_order(10, 0.3, "validation", 1337).tolist() == [9, 2, 3]
    assert split_order(3, None, None, 1337).tolist() == [0, 1, 2]


def test_a_split_of_a_folder_has_each_file_once_with_its_label(pets: Path) -> None:
    parts = [
        image_folder_source(pets, validation_split=0.3, subset=subset)
        for subset in ("training", "validation")
    ]
    assert [len(part) for part in parts] == [8, 3]
    whole = image_folder_source(pets)
    labels = dict(zip(whole.paths, whole.labels, strict=True))
    assert sorted(p for part in parts for p in part.paths) == sorted(whole.paths)
    for part in parts:
        assert part.labels == tuple(labels[p] for p in part.paths)
        assert part.classes == whole.classes


def test_only_image_files_count_at_any_depth(pets: Path) -> None:
    (pets / "cat" / "notes.txt").write_text("hello")
    (pets / "cat" / "._0.png").write_text("hello")
    (pets / ".git").mkdir()
    save(pets / "cat" / "more" / "of" / "A.PNG", noise(9, 9))
    source = image_folder_source(pets)
    assert len(source) == 12
    assert names(source, pets)[5] == "cat/more/of/A.PNG"
    files = image_files(pets)
    assert (files.images, files.ignored) == (source.paths, 2)
    assert image_files(pets, (".txt",)).images == (str(pets / "cat" / "notes.txt"),)


def test_a_linked_class_folder_is_a_class(pets: Path, tmp_path: Path) -> None:
    save(tmp_path / "elsewhere" / "a.png", noise(9, 9))
    (pets / "ant").symlink_to(tmp_path / "elsewhere")
    source = image_folder_source(pets)
    assert source.classes[0] == "ant"
    assert names(source, pets)[0] == "ant/a.png"


def test_folders_that_are_no_data_set(pets: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere' does not exist"):
        image_folder_source(tmp_path / "nowhere")
    with pytest.raises(UserError, match="not a directory"):
        image_folder_source(pets / "cat" / "0.png")
    with pytest.raises(UserError, match="no folders of classes"):
        image_folder_source(pets / "cat")
    with pytest.raises(UserError, match="only one class, 'pets'"):
        image_folder_source(tmp_path)
    (pets / "ant").mkdir()
    (pets / "ant" / "notes.txt").write_text("hello")
    with pytest.raises(UserError, match=r"class folder 'ant' .* has no image"):
        image_folder_source(pets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subset": "trainning", "validation_split": 0.2}, "'trainning'(.|\n)*mean 'training'"),
        ({"subset": "training"}, "validation_split=None and subset='training' must come together"),
        ({"validation_split": 0.2}, "must come together"),
        ({"subset": "training", "validation_split": 0.0}, "0.0 is not between 0 and 1"),
        ({"subset": "training", "validation_split": 1}, "1 is not between"),
        ({"subset": "training", "validation_split": float("nan")}, "nan is not between"),
        ({"subset": "validation", "validation_split": 0.05}, "leaves none for validation"),
        ({"image_size": (0, 180)}, r"\(0, 180\)"),
        ({"image_size": (180.0, 180)}, r"\(180.0, 180\)"),
        ({"image_size": (180,)}, r"\(180,\)"),
        ({"seed": -1}, "seed=-1"),
        ({"color": "grey"}, "unknown color 'grey'(.|\n)*grayscale"),
        ({"dtype": torch.int8}, "torch.int8"),
    ],
)
def test_options_that_break_a_rule(pets: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        image_folder_source(pets, **options)


PHOTOS = Path(__file__).parents[3] / "shared" / "data" / "PetImages"


@skip_if(not PHOTOS.is_dir(), "data", "the folder of real photos is absent")
def test_real_photos() -> None:
    training = image_folder_source(PHOTOS, validation_split=0.2, subset="training")
    validation = image_folder_source(PHOTOS, validation_split=0.2, subset="validation")
    assert (training.classes, len(training), len(validation)) == (("Cat", "Dog"), 4000, 999)
    assert {int(training[i][1]) for i in range(20)} == {0, 1}
    assert abs(sum(training.labels) / 4000 - 0.5) < 0.03
