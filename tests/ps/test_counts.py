"""What a task sees of the whole training adds up, however often it looks."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from spartito.ps.protocol.messages import Values, advance

Looks = st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=20)


@given(looks=Looks, shards=st.integers(1, 5))
def test_looks_add_up_to_global_batches_and_steps(
    looks: list[tuple[int, int, int]], shards: int
) -> None:
    counts = [Values(0, 0, 0, 0)]
    for pushes, work_items, examples in looks:
        last = counts[-1]
        counts.append(
            Values(
                last.version,
                last.pushes + pushes,
                last.work_items + work_items,
                last.examples + examples,
            )
        )
    found = [advance(before, now, shards) for before, now in pairwise(counts)]
    end = counts[-1]
    assert [sum(each) for each in zip(*found, strict=True)] == [
        end.examples,
        end.work_items // shards,
        end.pushes // shards,
    ]
    assert advance(end, counts[0], shards) == (0, 0, 0)
