"""torch's own cases for a backend pass on ours."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.backend import torch_cases
from tests.replicas import Replicas
from tests.skips import skip_if

EXCLUDED = torch_cases.excluded()
CASES = [name for name in torch_cases.names() if name not in EXCLUDED]


def ranks(case: str) -> int:
    """torch runs cases about a part of the ranks with 8 or more; of these it has 4 anyway."""
    is_part = "_group" in case and "full_group" not in case and "subgroup" not in case
    return 8 if is_part else 4


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@skip_if(find_spec("expecttest") is None, "dev", "expecttest")
def test_the_case_passes(replicas: Replicas, case: str, tmp_path: Path) -> None:
    size = ranks(case)
    passed = [(torch_cases.PASSED, "")] * size
    assert replicas(torch_cases.run, size, "spartito", case, str(tmp_path)) == passed


def test_the_list_of_what_does_not_run_names_cases_of_torch() -> None:
    assert set(EXCLUDED) <= set(torch_cases.names())
    assert all(EXCLUDED.values())
