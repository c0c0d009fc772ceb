"""Which blocks are in memory, and when."""

from __future__ import annotations

from contextlib import closing
from queue import SimpleQueue

from spartito.data.blocks.reading import AHEAD, BlockReader


def test_blocks_that_come_next_are_fetched_before_they_are_wanted() -> None:
    loaded = SimpleQueue[int]()
    order = [5, 3, 1, 0, 2, 4, 6]
    with closing(BlockReader(lambda block: loaded.put(block))) as reader:
        reader.expect(order, live=1)
        reader.get([5])
        assert sorted(loaded.get(timeout=60) for _ in range(1 + AHEAD[0])) == sorted(order[:5])


def test_so_many_blocks_are_kept_that_nobody_has_said_will_be_wanted() -> None:
    loaded: list[int] = []
    kept = 1 + AHEAD[0] + 1
    with closing(BlockReader(lambda block: loaded.append(block))) as reader:
        for block in [*range(10), *range(10 - kept, 10)]:
            reader.get([block])
        assert loaded == [*range(10)]
        reader.get([9 - kept])
        assert loaded == [*range(10), 9 - kept]
