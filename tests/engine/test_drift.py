"""Whoever differs from the others is found."""

from __future__ import annotations

import torch

from spartito.engine.drift import drifted, moments, outliers

KINDS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def test_rounding_is_not_drifting() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    others = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    rounded = values * (1 + 1e-6)
    broken = values.clone()
    broken[0] = torch.nan
    found = [moments([part]) for part in (values, rounded, others, values * 1.01, broken)]
    assert drifted(found) == [False, False, True, True, True]


def test_outliers_are_those_that_differ_from_most() -> None:
    assert outliers([3, 3, 3]) == []
    assert outliers([1, 3, 3]) == [0]
    assert outliers([1, 2]) == [1]
    assert outliers([1, 2, 2, 1, 5]) == [1, 2, 4]
