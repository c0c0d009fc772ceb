"""Random transforms: right pixels, and nothing that the generator does not decide."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from spartito.data.images.transforms import (
    FILLS,
    FLIPS,
    RandomFlip,
    RandomRotation,
    RandomTransform,
    Rescale,
    rotate,
)
from spartito.errors import UserError

DTYPES = (torch.float32, torch.float64)


@st.composite
def images(draw: st.DrawFn) -> torch.Tensor:
    """An image of 1 to 4 channels, up to 12x12, its pixels in rows or in planes."""
    channels, height, width = draw(st.tuples(st.integers(1, 4), *[st.integers(1, 12)] * 2))
    pixels = np.random.default_rng(draw(st.integers(0, 99))).random((height, width, channels))
    image = torch.from_numpy(pixels * 255).to(draw(st.sampled_from(DTYPES))).permute(2, 0, 1)
    return image if draw(st.booleans()) else image.contiguous()


transforms = st.one_of(
    st.sampled_from(sorted(FLIPS)).map(RandomFlip),
    st.builds(RandomRotation, st.floats(0, 1), st.sampled_from(sorted(FILLS))),
)


@given(images(), transforms, st.integers(0, 2**32))
def test_shape_dtype_layout_and_the_generators_word(
    image: torch.Tensor, transform: RandomTransform, seed: int
) -> None:
    before = image.clone()
    first = transform.apply(image, np.random.default_rng(seed))
    again = transform.apply(image, np.random.default_rng(seed))
    assert (first.shape, first.dtype) == (image.shape, image.dtype)
    if min(image.shape) > 1:  # the stride of a dim of one is nobody's concern
        assert first.stride() == image.stride()
    assert torch.equal(first, again)
    assert torch.equal(image, before)


@given(images(), st.sampled_from(sorted(FLIPS)))
def test_a_flip_twice_is_no_flip(image: torch.Tensor, mode: str) -> None:
    seed = 5
    transform = RandomFlip(mode)
    once = transform.apply(image, np.random.default_rng(seed))
    assert torch.equal(transform.apply(once, np.random.default_rng(seed)), image)


def test_a_flip_mirrors_half_of_the_images_left_to_right() -> None:
    image = torch.arange(6.0).reshape(1, 2, 3)
    generator = np.random.default_rng(3)
    flipped = [RandomFlip("horizontal").apply(image, generator) for _ in range(400)]
    mirrored = sum(torch.equal(f, image.flip(-1)) for f in flipped)
    assert mirrored + sum(torch.equal(f, image) for f in flipped) == 400
    assert 150 < mirrored < 250


def test_two_directions_are_drawn_apart() -> None:
    image = torch.arange(6.0).reshape(1, 2, 3)
    generator = np.random.default_rng(3)
    transform = RandomFlip("horizontal_and_vertical")
    seen = {tuple(transform.apply(image, generator).flatten().tolist()) for _ in range(100)}
    assert len(seen) == 4


@given(images())
def test_no_rotation_changes_nothing(image: torch.Tensor) -> None:
    transform = RandomRotation(0.0)
    assert torch.equal(transform.apply(image, np.random.default_rng(1)), image)
    # Without the short cut for no angle, too, up to rounding of a coordinate (of 1e-6 of a side).
    for fill in ("reflect", "nearest"):
        assert torch.allclose(rotate(image, 2 * math.pi, fill), image, rtol=0, atol=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", [1, 2, 7, 8])
def test_quarter_turns_are_counter_clockwise(side: int, dtype: torch.dtype) -> None:
    image = torch.rand(3, side, side, dtype=dtype, generator=torch.Generator().manual_seed(0))
    for quarters in range(-3, 4):
        wanted = torch.rot90(image, quarters, dims=(1, 2))
        assert torch.allclose(rotate(image, quarters * math.pi / 2), wanted, atol=1e-5)


def reference(image: NDArray[np.float64], angle: float) -> NDArray[np.float64]:
    """The same by its definition, pixel by pixel: (height, width), fill mode reflect."""
    height, width = image.shape
    padded = np.pad(image, 3 * max(height, width), mode="symmetric")
    offset, out = 3 * max(height, width), np.empty_like(image)
    centre_y, centre_x = (height - 1) / 2, (width - 1) / 2
    cos, sin = math.cos(angle), math.sin(angle)
    for row in range(height):
        for column in range(width):
            dy, dx = row - centre_y, column - centre_x
            y = sin * dx + cos * dy + centre_y + offset
            x = cos * dx - sin * dy + centre_x + offset
            i, j = math.floor(y), math.floor(x)
            v, u = y - i, x - j
            top = (1 - u) * padded[i, j] + u * padded[i, j + 1]
            bottom = (1 - u) * padded[i + 1, j] + u * padded[i + 1, j + 1]
            out[row, column] = (1 - v) * top + v * bottom
    return out


@given(st.integers(2, 9), st.integers(2, 9), st.floats(-7, 7))
def test_any_turn_of_an_oblong_is_bilinear_and_reflected(
    height: int, width: int, angle: float
) -> None:
    pixels = np.random.default_rng(0).random((height, width))
    turned = rotate(torch.from_numpy(pixels)[None], angle)[0].numpy()
    assert np.abs(turned - reference(pixels, angle)).max() < 1e-9


def test_what_stands_outside() -> None:
    image = torch.full((1, 9, 9), 5.0)
    for fill, corner in (("reflect", 5.0), ("nearest", 5.0), ("constant", 0.0)):
        turned = rotate(image, math.pi / 4, fill)
        assert float(turned[0, 0, 0]) == pytest.approx(corner, abs=1e-4)
        assert float(turned[0, 4, 4]) == pytest.approx(5.0, abs=1e-4)


def test_the_angle_is_uniform_within_the_factor() -> None:
    """A point right of the centre lands where the angle says; its height is the sine."""
    ramp = torch.linspace(-1, 1, 21, dtype=torch.float64).reshape(1, 21, 1).repeat(1, 1, 21)
    generator = np.random.default_rng(0)
    transform = RandomRotation(0.1)
    # On a ramp of heights, the pixel half-way to the right shows half the sine of its angle.
    heights = [float(transform.apply(ramp, generator)[0, 10, 15]) for _ in range(300)]
    angles = np.arcsin(np.array(heights) * 2)
    assert np.abs(angles).max() <= 0.1 * 2 * math.pi + 1e-6
    assert np.abs(angles).max() > 0.095 * 2 * math.pi
    assert abs(angles.mean()) < 0.06
    assert angles.std() == pytest.approx(0.2 * 2 * math.pi / math.sqrt(12), rel=0.1)


def test_half_precision_keeps_its_dtype() -> None:
    image = torch.rand(3, 8, 8, dtype=torch.bfloat16)
    assert rotate(image, 0.3).dtype == torch.bfloat16


def test_the_image_of_every_sort_of_sample() -> None:
    image, label = torch.arange(6.0).reshape(1, 2, 3), torch.tensor(4)
    double = Rescale(2.0)
    x, y = double((image, label))
    assert torch.equal(x, image * 2)
    assert y is label
    assert torch.equal(double(image), image * 2)
    assert torch.equal(double([image, label])[0], image * 2)
    sample = {"x": image, "y": label}
    assert torch.equal(double(sample)["x"], image * 2)
    assert torch.equal(sample["x"], image)
    for wrong in ({"image": image}, (), 3):
        with pytest.raises(UserError, match="no image"):
            double(wrong)


def test_rescale_keeps_floats_and_widens_bytes() -> None:
    for dtype in (*DTYPES, torch.bfloat16):
        assert Rescale(1 / 255)(torch.ones(1, 2, 2, dtype=dtype)).dtype == dtype
    whole = Rescale(1 / 255, offset=-0.5)(torch.full((1, 2, 2), 255, dtype=torch.uint8))
    assert whole.dtype == torch.float32
    assert torch.allclose(whole, torch.full((1, 2, 2), 0.5))


def test_mistakes() -> None:
    with pytest.raises(UserError, match=r"'horizontl'(.|\n)*mean 'horizontal'"):
        RandomFlip("horizontl")
    for factor in (-0.1, 1.1, math.nan):
        with pytest.raises(UserError, match="not within 0 and 1"):
            RandomRotation(factor)
    with pytest.raises(UserError, match=r"'reflct'(.|\n)*mean 'reflect'"):
        RandomRotation(0.1, "reflct")
    for image in (torch.zeros(3, 4, 4, dtype=torch.uint8), torch.zeros(4, 4)):
        with pytest.raises(UserError, match="cannot be rotated"):
            rotate(image, 0.1)
