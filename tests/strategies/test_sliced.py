"""Divided updates make the numbers of plain torch, and of replicas that each update all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spartito.collectives.memory.slices import GRAIN, cut
from tests.replicas import Replicas
from tests.skips import shares_memory
from tests.strategies import sliced_jobs as jobs


@shares_memory
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("case", jobs.CASES)
def test_every_kind_of_update_is_that_of_plain_torch(
    replicas: Replicas, case: str, world_size: int
) -> None:
    expected = jobs.by_torch(case)
    for found, divided in replicas(jobs.by_replicas, world_size, case):
        assert divided == jobs.CASES[case][3]
        for step, (ours, torchs) in enumerate(zip(found, expected, strict=True)):
            assert ours.keys() == torchs.keys(), step
            for name, value in torchs.items():
                torch.testing.assert_close(
                    ours[name].to(value.dtype), value, rtol=0, atol=1e-12, msg=f"{name}, {step}"
                )


@shares_memory
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", ["adam", "sgd", "bf16"])
def test_bitwise_as_replicas_that_update_all(
    replicas: Replicas, kind: str, world_size: int
) -> None:
    whole = replicas(jobs.in_fp32, world_size, kind, False)[0]
    for found in replicas(jobs.in_fp32, world_size, kind, True):
        assert found.keys() == whole.keys()
        for name, value in whole.items():
            assert torch.equal(found[name], value), name


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([1, 2, 4, 8])), max_size=12),
    st.integers(1, 7),
)
def test_sections_are_all_elements_once(sizes: list[tuple[int, int]], parts: int) -> None:
    sections, size = cut(sizes, parts)
    assert [section.owner for section in sections] == sorted(section.owner for section in sections)
    for number, (numel, itemsize) in enumerate(sizes):
        own = [section for section in sections if section.tensor == number]
        assert [section.start for section in own] == [0, *(section.stop for section in own[:-1])]
        assert own[-1].stop == numel
        assert all(section.start % GRAIN == 0 and section.offset % 64 == 0 for section in own)
        assert {section.whole for section in own} == {len(own) == 1}
        assert {section.offset - section.start * itemsize for section in own} == {own[0].offset}
    ends = [
        section.offset + (section.stop - section.start) * sizes[section.tensor][1]
        for section in sections
    ]
    assert all(end <= section.offset for end, section in zip(ends, sections[1:], strict=False))
    assert not ends or ends[-1] <= size
    for part in range(parts):  # a block more, and what lies between two tensors
        own_bytes = sum(
            (section.stop - section.start) * sizes[section.tensor][1]
            for section in sections if section.owner == part
        )  # fmt: skip
        assert own_bytes <= size / parts + GRAIN * 8 + 1
