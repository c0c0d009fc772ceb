"""What is looked at of a stream's first batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spartito.data.reading.stream_checksum import stream_checksum

PIXELS = torch.arange(2.0 * 3000).reshape(2, 3000)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])),
        (torch.tensor([True, False]), torch.tensor([False, False])),
        (torch.tensor([1j, 2j]), torch.tensor([1j, 3j])),
        (torch.tensor([1.0]).bfloat16(), torch.tensor([2.0]).bfloat16()),
        (PIXELS, PIXELS.flip(1)),
        (PIXELS.t(), PIXELS.t() + 1),
        ((PIXELS, torch.tensor([1, 2])), (PIXELS, torch.tensor([2, 1]))),
        ({"x": {"ids": torch.tensor([4])}}, {"x": {"ids": torch.tensor([5])}}),
        (["a", "b"], ["a", "c"]),
        ([3, 4], [3, 5]),
        ((torch.empty(0), "a"), (torch.empty(0), "b")),
    ],
)
def test_other_examples_have_another_checksum(one: Any, other: Any) -> None:
    assert stream_checksum(one) == stream_checksum(one)
    assert stream_checksum(one) != stream_checksum(other)


def test_rounding_counts_only_where_nothing_is_exact() -> None:
    labels = torch.tensor([1, 2])
    assert stream_checksum((PIXELS, labels)) == stream_checksum((PIXELS + 1e-3, labels))
    assert stream_checksum(PIXELS) != stream_checksum(PIXELS + 1e-3)


@pytest.mark.parametrize("data", [(), [], None, torch.eye(2).to_sparse(), torch.empty(2, 0)])
def test_what_has_no_values_of_the_host_has_none(data: Any) -> None:
    assert stream_checksum(data) == 0
