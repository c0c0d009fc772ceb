"""Outputs of microbatches as that of their batch."""

from __future__ import annotations

import pytest
import torch

from spartito.errors import UserError
from spartito.pipeline.microbatches import joined


def test_rows_stand_one_after_the_other_and_scalars_are_means() -> None:
    whole = joined(
        [{"rows": torch.ones(3, 2), "mean": torch.tensor(1.0)},
         {"rows": torch.zeros(1, 2), "mean": torch.tensor(5.0)}],
        [3, 1],
    )  # fmt: skip
    assert whole["rows"].shape == (4, 2)
    assert whole["mean"] == 2


def test_an_output_that_compares_rows_is_refused() -> None:
    with pytest.raises(UserError, match=r"\(3, 3\).*compares the rows.*\n.*microbatches=1"):
        joined([torch.ones(3, 3), torch.ones(2, 2)], [3, 2])
