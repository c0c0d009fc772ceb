from __future__ import annotations

from pathlib import Path

import pytest

from spartito.launch.processes.gpus import count_gpus


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 3), ("", 0), ("0", 1), ("0,2", 2), ("-1", 0), ("1,-1,2", 1), ("GPU-4fa,GPU-5", 2)],
)
def test_gpus_are_those_that_the_driver_lists_and_we_may_see(
    tmp_path: Path, visible: str | None, count: int
) -> None:
    for name in "abc":
        (tmp_path / "driver/nvidia/gpus" / name).mkdir(parents=True)
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(env, tmp_path) == count


def test_without_a_driver_there_are_no_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == 0


def test_the_query_counts_gpus_not_their_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = tmp_path / "nvidia-smi"
    query.write_text("#!/bin/sh\necho 'GPU 0: X'\necho '  MIG 1g: Y'\necho 'GPU 1: X'\n")
    query.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert count_gpus({}, tmp_path) == 2
