"""What a task tells of its part of a state."""

from __future__ import annotations

import pytest
import torch

from spartito.checkpoint.cuts import Cut, SpanCut
from spartito.errors import UserError
from spartito.steps.state_parts import _take


def test_a_state_that_is_not_cut_as_its_parameter_is_refused() -> None:
    found: dict[int, Cut] = {}
    cut = SpanCut((4, 2), 0, 4)
    part = torch.zeros(cut.local)
    _take(found, "exp_avg of weight", part, cut)
    assert found == {id(part): cut}
    with pytest.raises(UserError, match=r"row_mean of weight is \(2,\) on this task"):
        _take(found, "row_mean of weight", torch.zeros(2), cut)
    assert found == {id(part): cut}
