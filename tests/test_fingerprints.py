"""Tensors that differ have other checksums and fingerprints."""

from __future__ import annotations

import pytest
import torch

from spartito.fingerprints import _mixed, checksum

KINDS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", KINDS)
def test_one_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    image = torch.arange(24.0).view(1, 2, 3, 4).to(dtype)
    tensors = [torch.tensor(1.0).to(dtype), image, torch.empty(0, dtype=dtype)]
    before = checksum(tensors)
    assert checksum([tensors[0], image.to(memory_format=torch.channels_last)]) == before
    assert checksum([image, tensors[0]]) != before
    image[0, 1, 2, 3] = torch.nextafter(image[0, 1, 2, 3].float(), torch.tensor(99.0)).to(dtype)
    image[0, 0, 0, 0] = 2.0**-14
    assert checksum(tensors) != before


@pytest.mark.parametrize("dtype", [*KINDS, torch.complex64, torch.complex128], ids=str)
def test_on_a_device_too_each_change_makes_another_number(dtype: torch.dtype) -> None:
    values = torch.randn(64, dtype=dtype)
    swapped = values.clone()
    swapped[[3, 40]] = values[[40, 3]]
    one = values.clone()
    one[63] = -one[63]
    forms = [values, -values, values.flip(0), swapped, one, values[:63]]
    found = [int(_mixed(each)) for each in forms]
    assert len({*found}) == len(found)
    assert int(_mixed(values.clone())) == found[0]
