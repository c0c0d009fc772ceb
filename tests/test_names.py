"""Words for people: lists, sizes and times."""

from __future__ import annotations

import pytest

from spartito.names import duration, listed, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 µs"),
        (8e-5, "80 µs"),
        (9.997e-4, "1 ms"),
        (0.0025, "2.5 ms"),
        (0.9998, "1 s"),
        (3.14, "3.14 s"),
        (270.0, "4.5 min"),
        (11_520.0, "3.2 h"),
        (1_045_440.0, "12.1 days"),
    ],
)
def test_a_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (5, "5 B"),
        (2100, "2.1 kB"),
        (999_700, "1.0 MB"),
        (312e6, "312 MB"),
        (1.4e9, "1.4 GB"),
        (4e12, "4000 GB"),
    ],
)
def test_a_size(count: float, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("", ""),
        ("a", "a"),
        ("ab", "a and b"),
        ("abc", "a, b and c"),
        ("abcd", "a, b, c and d"),
        ("abcde", "a, b, c and 2 more"),
    ],
)
def test_a_list(names: str, text: str) -> None:
    assert listed(list(names), 4) == text
    assert listed([*names, "z"]).endswith(" and z" if names else "z")
