"""Packed files: what was written is read, in an order that depends on nothing but the seed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spartito as sp
from spartito.data.blocks import json_lines, mds, tars
from spartito.data.blocks.source import PackedSource
from spartito.data.reading.loader import Loader
from spartito.data.reading.order import spread
from spartito.errors import UserError
from spartito.storage.files import braced
from tests.data.packed_files import (
    WRITERS,
    names,
    tokens,
    write_all,
    write_mds,
    write_parquet,
    write_tar,
)
from tests.data.web_server import WebServer, serving

SIZES = (23, 1, 40, 17)
COUNT = sum(SIZES)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks of a few examples, and a cache of this test's own."""
    for module in (json_lines, mds, tars):
        monkeypatch.setattr(module, "TARGET", 400)
    monkeypatch.setenv("SPARTITO_CACHE", str(tmp_path / "cache"))


@pytest.fixture(params=list(WRITERS))
def format(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A format, of which there are files in ``tmp_path / "data"``."""
    write_all(tmp_path / "data", request.param, SIZES)
    return str(request.param)


@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    live=st.integers(1, 50),
    seed=st.integers(0, 2**63),
)
def test_an_order_has_each_example_once_and_few_blocks_at_a_time(
    rows: list[int], live: int, seed: int
) -> None:
    edges = np.concatenate([[0], np.cumsum(rows)])
    examples, blocks = spread(edges, live, seed, 3)
    assert sorted(examples.tolist()) == list(range(edges[-1]))
    used = np.searchsorted(edges, examples, side="right") - 1
    first = {block: int(np.flatnonzero(used == block)[0]) for block in range(len(rows))}
    last = {block: int(np.flatnonzero(used == block)[-1]) for block in range(len(rows))}
    for position in range(len(examples)):
        open_ones = sum(first[block] <= position <= last[block] for block in first)
        assert open_ones <= live + 1
    again, _ = spread(edges, live, seed, 3)
    assert (again == examples).all()
    assert sorted(blocks.tolist()) == list(range(len(rows)))


def test_all_blocks_in_use_are_a_permutation_of_everything() -> None:
    """Each example is anywhere in the order, as often as chance has it."""
    edges = np.arange(0, 101, 10)
    positions = np.zeros((100, 10))
    for seed in range(2000):
        order, _ = spread(edges, 10, seed, 0)
        positions[order, np.arange(100) // 10] += 1
    expected = 2000 / 10
    deviation = ((positions - expected) ** 2 / expected).sum() / (99 * 9)
    assert 0.8 < deviation < 1.2  # chi squared by its degrees of freedom


def test_examples_are_those_that_were_written(format: str, tmp_path: Path) -> None:
    columns = names(format, "tokens", "y", "text")
    data = sp.data.packed(tmp_path / "data", columns)
    assert len(data) == COUNT
    seen: list[int] = []
    for x, y, text in data.batch(8):
        for row, number, words in zip(x, y.tolist(), text, strict=True):
            assert row.tolist() == tokens(number).tolist()
            assert words == f"text {number}"
        seen += y.tolist()
    assert seen == list(range(COUNT))


def test_columns_decide_what_an_example_is(format: str, tmp_path: Path) -> None:
    y, x = names(format, "y", "tokens")
    alone = next(iter(sp.data.packed(tmp_path / "data", y).batch(4)))
    assert alone.tolist() == [0, 1, 2, 3]
    whole = next(iter(sp.data.packed(tmp_path / "data").batch(4)))
    assert whole[y].tolist() == [0, 1, 2, 3]
    assert whole[x].shape == (4, 7)
    with pytest.raises(UserError, match=r"there is no column|has a column 'nothing'"):
        sp.data.packed(tmp_path / "data", ("nothing",))


def flat(parts: Iterable[list[int]]) -> list[int]:
    return [number for part in parts for number in part]


def ids(batches: Iterator[Any]) -> list[int]:
    return [number for batch in batches for number in batch.data.tolist()]


def test_the_order_is_the_same_at_any_number_of_workers_and_resumes(
    format: str, tmp_path: Path
) -> None:
    data = sp.data.packed(tmp_path / "data", names(format, "y")).shuffle(blocks=3).batch(10)
    alone = [batch.data.tolist() for batch in Loader(data, seed=5)]
    assert sorted(flat(alone)) == list(range(COUNT))
    assert flat(alone) != list(range(COUNT))
    for count in (2, 3, 5):
        shards = [
            [batch.data.tolist() for batch in Loader(data, (index, count), seed=5)]
            for index in range(count)
        ]
        assert [flat(parts) for parts in zip(*shards, strict=True)] == alone
        for start in (1, 4, len(alone) - 1):
            found = []
            for index in range(count):
                again = sp.data.packed(tmp_path / "data", names(format, "y"))
                loader = Loader(again.shuffle(blocks=3).batch(10), (index, count), seed=5)
                loader.load_state_dict({"pass": 0, "step": start})
                found.append([batch.data.tolist() for batch in loader])
            assert [flat(parts) for parts in zip(*found, strict=True)] == alone[start:]


def test_examples_are_copies(format: str, tmp_path: Path) -> None:
    """What a map writes into an example is not there in the next epoch."""

    def spoil(x: Any, y: Any) -> Any:
        x[:] = -1
        return x, y

    columns = names(format, "tokens", "y")
    data = sp.data.packed(tmp_path / "data", columns)
    spoiled = data.map(spoil).repeat(2).batch(COUNT)
    assert [int(x.max()) for x, _ in spoiled] == [-1, -1]
    assert [x[5].tolist() for x, _ in data.batch(COUNT)] == [tokens(5).tolist()]


@pytest.mark.parametrize("live", [None, 2, "all"])
def test_one_after_the_other(live: Any, tmp_path: Path) -> None:
    """Examples without batches have the same order."""
    write_all(tmp_path / "data", "parquet", SIZES)
    data = sp.data.packed(tmp_path / "data", "y")
    data = data if live is None else data.shuffle(seed=3, blocks=live)
    single = [int(each) for each in data]
    assert single == torch.cat(list(data.batch(9))).tolist()


# ---- over a network


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WebServer]:
    write_all(tmp_path / "data", "parquet", (50, 50, 50))
    with serving(tmp_path / "data") as made:
        yield made


def remote(server: WebServer, *columns: str) -> sp.data.Dataset:
    return sp.data.packed(f"{server.url}/part-{{000..002}}.parquet", columns or ("y",))


def test_faults_of_a_server_change_nothing(server: WebServer) -> None:
    expected = [batch.tolist() for batch in remote(server).shuffle(1, blocks=4).batch(16)]
    os.environ["SPARTITO_CACHE"] += "-new"  # of the fixture above, which puts it back
    faults = ("500", "429", "cut", "short")
    server.fault = lambda number: faults[number // 2 % 4] if number % 2 else None
    server.requests = 0
    assert [batch.tolist() for batch in remote(server).shuffle(1, blocks=4).batch(16)] == expected
    assert server.requests > 8


def test_each_part_is_fetched_once_for_all_workers(server: WebServer) -> None:
    for epoch in range(2):
        for index in range(2):
            data = remote(server).shuffle(1, blocks=4).batch(16)
            loader = Loader(data, (index, 2))
            loader.load_state_dict({"pass": epoch, "step": 0})
            assert len(list(loader)) == 10
    assert max(server.ranges.values()) == 1
    footers = [key for key in server.ranges if key[2] == (server.folder / key[0]).stat().st_size]
    assert len(footers) == 3
    assert len(server.ranges) - len(footers) == 15  # blocks: those of the chosen column alone
    wanted = sum(
        stop - start for name, start, stop in server.ranges if (name, start, stop) not in footers
    )
    assert wanted < sum(file.stat().st_size for file in server.folder.iterdir()) / 2


@pytest.mark.parametrize(
    ("fault", "said"),
    [("403", "403"), ("short", "got"), ("500", "500")],
)
def test_what_fails_for_good_is_named(
    server: WebServer, monkeypatch: pytest.MonkeyPatch, fault: str, said: str
) -> None:
    monkeypatch.setattr("spartito.storage.files.PAUSES", (0.0, 0.0))
    data = remote(server).batch(16)
    server.fault = lambda number: fault
    with pytest.raises(
        UserError, match=r"part-00\d.parquet, bytes [\d,]+ to [\d,]+, cannot"
    ) as seen:
        list(data)
    assert said in str(seen.value)


def test_a_file_that_is_not_there(server: WebServer) -> None:
    with pytest.raises(UserError, match=r"part-009.parquet cannot be read"):
        sp.data.packed(f"{server.url}/part-009.parquet")
    with pytest.raises(UserError, match="cannot be listed"):
        sp.data.packed(server.url)


# ---- what is wrong with files


def test_a_file_that_was_cut_off_is_named(format: str, tmp_path: Path) -> None:
    file = sorted((tmp_path / "data").iterdir())[2]
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    if format == "jsonl":  # half a line is one that is no JSON
        found = Loader(sp.data.packed(tmp_path / "data", names(format, "y")).batch(5))
        numbers = ids(iter(found))
        assert len(numbers) < COUNT
        assert set(numbers) < set(range(COUNT))
        return
    with pytest.raises(UserError, match=r"part-002.* is no whole"):
        sp.data.packed(tmp_path / "data")


def test_a_file_that_changed_is_looked_at_again(format: str, tmp_path: Path) -> None:
    assert len(sp.data.packed(tmp_path / "data")) == COUNT
    suffix, write, _ = WRITERS[format]
    write(tmp_path / "data" / f"part-001{suffix}", range(500, 505))
    data = sp.data.packed(tmp_path / "data", names(format, "y"))
    assert len(data) == COUNT + 4
    assert set(range(500, 505)) < set(ids(iter(Loader(data.batch(7)))))


def test_a_file_that_changes_in_use_is_refused_in_the_next_pass(
    format: str, tmp_path: Path
) -> None:
    suffix, write, _ = WRITERS[format]
    loader = Loader(sp.data.packed(tmp_path / "data", names(format, "y")).batch(7))
    assert len(ids(iter(loader))) == COUNT
    assert len(ids(iter(loader))) == COUNT
    write(tmp_path / "data" / f"part-001{suffix}", range(500, 501))
    with pytest.raises(UserError, match=rf"part-001{suffix} was written after it was opened"):
        next(iter(loader))


def test_a_value_that_is_missing_is_a_corrupt_example(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(
        pa.table({"y": [0, None, 2], "l": [[1, 2], [3, None], [4, 5]]}), tmp_path / "a.parquet"
    )
    assert ids(iter(Loader(sp.data.packed(tmp_path / "a.parquet", "y").batch(3)))) == [0, 2]
    found = next(iter(sp.data.packed(tmp_path / "a.parquet", "l").batch(3)))
    assert found.tolist() == [[1, 2], [4, 5]]


def test_a_column_that_only_some_blocks_have_is_not_dropped(tmp_path: Path) -> None:
    lines = [f'{{"y": {y}}}' if y < 40 else f'{{"y": {y}, "z": {y}}}' for y in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = sp.data.packed(tmp_path / "a.jsonl").source
    assert isinstance(source, PackedSource)
    assert len(source.edges) > 3
    found = source.read_batch([1, 55, 2])
    assert found.data == {"y": torch.tensor([55]), "z": torch.tensor([55])}
    assert [index for index, _ in found.corrupt] == [1, 2]


def test_a_lost_sample_of_a_tar_is_a_corrupt_example(tmp_path: Path) -> None:
    import io
    import tarfile

    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in (("0.cls", b"0"), ("1.txt", b"alone"), ("2.cls", b"x"), ("3.cls", b"3")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    assert ids(iter(Loader(sp.data.packed(tmp_path / "a.tar", "cls").batch(4)))) == [0, 3]


def test_arrays_of_mds_that_say_their_shape(tmp_path: Path) -> None:
    write_mds(tmp_path / "a.mds", range(9))
    x = next(iter(sp.data.packed(tmp_path / "a.mds", "tokens").batch(9)))
    assert x[8].tolist() == tokens(8).tolist()
    array = np.arange(300, dtype=np.float32).reshape(1, 300)
    told = bytes([34, (2 << 2) | 1]) + np.array([1, 300], np.uint16).tobytes() + array.tobytes()
    assert (mds._array(told, "", ()) == array).all()
    assert (mds._array(told[1:], "float32", ()) == array).all()


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    write_mds(tmp_path / "a.mds", range(3), encoding="pkl")
    with pytest.raises(UserError, match="'pkl' is not read"):
        sp.data.packed(tmp_path / "a.mds")
    assert len(sp.data.packed(tmp_path / "a.mds", "y")) == 3


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", range(5))
    write_tar(tmp_path / "b.tar", range(5))
    data = sp.data.packed(tmp_path / "a.parquet", "y")
    with pytest.raises(UserError, match="shuffle\\(\\) of examples that lie in 1 blocks"):
        data.shuffle()
    with pytest.raises(UserError, match="blocks=0"):
        data.shuffle(blocks=0)
    with pytest.raises(UserError, match="which has no blocks"):
        sp.data.arrays(torch.ones(3)).shuffle(blocks=2)
    with pytest.raises(UserError, match="several formats"):
        sp.data.packed(tmp_path)
    with pytest.raises(UserError, match="Did you mean 'parquet'"):
        sp.data.packed(tmp_path, format="parket")
    with pytest.raises(UserError, match="has no file that"):
        sp.data.packed(tmp_path / "*.mds")
    with pytest.raises(UserError, match="unknown protocol"):
        sp.data.packed("s4://bucket/data")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="It is empty"):
        sp.data.packed(tmp_path / "empty")
    assert len(sp.data.packed(tmp_path, format="parquet")) == 5


def test_braces() -> None:
    assert braced("a-{08..10}.{tar,txt}") == [
        *("a-08.tar", "a-08.txt", "a-09.tar", "a-09.txt", "a-10.tar", "a-10.txt")
    ]
    with pytest.raises(UserError, match="ends before"):
        braced("{3..1}")
