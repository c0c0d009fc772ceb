"""ArrayRecord and Lance, whose own libraries read them: as all packed data, or refused."""

from __future__ import annotations

import importlib
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import spartito as sp
from spartito.data.blocks import array_records, lance_tables
from spartito.data.reading.loader import Loader
from spartito.errors import UserError
from tests.data.web_server import serving

COUNT = 90


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks of a few examples, and a cache of this test's own."""
    for module in (array_records, lance_tables):
        monkeypatch.setattr(module, "TARGET", 400)
    monkeypatch.setenv("SPARTITO_CACHE", str(tmp_path / "cache"))


def write_records(file: Path, numbers: range, options: str = "group_size:4,uncompressed") -> None:
    module = pytest.importorskip(
        "array_record.python.array_record_module", reason="dev: array_record"
    )
    writer = module.ArrayRecordWriter(str(file), options)
    for number in numbers:
        writer.write(b"%d" % number * 200)  # blocks are counted by the file, which has 64 KiB
    writer.close()


def write_table(folder: Path, numbers: range) -> None:
    """Two fragments or more, each with a row that was deleted."""
    lance = pytest.importorskip("lance", reason="dev: pylance")
    shutil.rmtree(folder, ignore_errors=True)
    rows = [row for number in numbers for row in ([-1, number] if number % 40 == 0 else [number])]
    tokens = pa.array(np.arange(2 * len(rows)))
    columns = {"y": rows, "pair": pa.FixedSizeListArray.from_arrays(tokens, 2)}
    columns["text"] = [f"text {row}" for row in rows]
    lance.write_dataset(pa.table(columns), str(folder), max_rows_per_file=50).delete("y = -1")


def records(tmp_path: Path) -> sp.data.Dataset:
    if not (tmp_path / "data").exists():
        (tmp_path / "data").mkdir()
        write_records(tmp_path / "data" / "a.array_record-00000-of-00002", range(50))
        write_records(tmp_path / "data" / "a.array_record-00001-of-00002", range(50, COUNT))
        (tmp_path / "data" / "dataset_info.json").write_text("{}")
    return sp.data.packed(tmp_path / "data", "record").map(lambda found: int(found[:2]))


def table(tmp_path: Path) -> sp.data.Dataset:
    if not (tmp_path / "data.lance").exists():
        write_table(tmp_path / "data.lance", range(COUNT))
    return sp.data.packed(tmp_path / "data.lance", "y")


MAKERS: list[Callable[[Path], sp.data.Dataset]] = [records, table]


@pytest.mark.parametrize("make", MAKERS)
def test_order_and_resuming_are_those_of_all_packed_data(
    make: Callable[[Path], sp.data.Dataset], tmp_path: Path
) -> None:
    plain = [int(number) for number in make(tmp_path)]
    source: Any = make(tmp_path).source
    assert len(source.edges) > 6
    assert len(plain) == COUNT
    alone = [b.data.tolist() for b in Loader(make(tmp_path).shuffle(blocks=3).batch(8), seed=5)]
    flat = [number for batch in alone for number in batch]
    assert sorted(flat) == sorted(plain)
    assert flat != plain
    for start in (0, 5):
        found = []
        for index in range(3):
            again = pickle.loads(pickle.dumps(make(tmp_path).source))
            data = sp.data.Dataset(again, make(tmp_path).example_maps).shuffle(blocks=3).batch(8)
            loader = Loader(data, (index, 3), seed=5)
            loader.load_state_dict({"pass": 0, "step": start})
            found.append([batch.data.tolist() for batch in loader])
        joined = [[n for part in parts for n in part] for parts in zip(*found, strict=True)]
        assert joined == alone[start:]


def test_records_are_bytes(tmp_path: Path) -> None:
    data = records(tmp_path)
    whole = list(sp.data.packed(tmp_path / "data"))
    assert [each["record"] for each in whole] == [b"%d" % n * 200 for n in range(COUNT)]
    blocks = [b.rows for b in data.source.blocks.indexes[0].blocks]  # type: ignore[union-attr]
    assert {rows % 4 for rows in blocks[:-1]} == {0}  # what is compressed together stays so
    with pytest.raises(UserError, match="no column 'image'"):
        sp.data.packed(tmp_path / "data", "image")


def test_records_that_were_cut_off_or_lie_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "a.array_record"
    write_records(file, range(500))
    with serving(tmp_path) as server, pytest.raises(UserError, match="from this machine's file"):
        sp.data.packed(f"{server.url}/a.array_record")
    data = file.read_bytes()
    for size in (0, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(UserError, match=r"a.array_record is no whole ArrayRecord file: "):
            sp.data.packed(file)
    spoiled = bytearray(data)
    spoiled[len(data) // 3] ^= 255
    file.write_bytes(spoiled)
    with pytest.raises(UserError, match=r"a.array_record, block \d+, is not what .* mismatch"):
        list(sp.data.packed(file))
    write_records(file, range(0))
    with pytest.raises(UserError, match="have no examples"):
        sp.data.packed(file)


def test_columns_of_a_table(tmp_path: Path) -> None:
    table(tmp_path)
    batch = next(iter(sp.data.packed(tmp_path / "data.lance").batch(COUNT)))
    assert batch["y"].tolist() == list(range(COUNT))
    assert batch["text"] == [f"text {number}" for number in range(COUNT)]
    assert (batch["pair"][:, 1] - batch["pair"][:, 0] == 1).all()
    pair, y = next(iter(sp.data.packed(f"file://{tmp_path}/data.lance/", ("pair", "y")).batch(4)))
    assert pair.shape == (4, 2)
    assert y.tolist() == [0, 1, 2, 3]
    with pytest.raises(UserError, match=r"there is no column 'z'"):
        sp.data.packed(tmp_path / "data.lance", "z")
    with pytest.raises(UserError, match=r"none.lance cannot be read: .* was not found"):
        sp.data.packed(tmp_path / "none.lance")
    windows = sp.data.tokens(
        tmp_path / "data.lance", 8, tokenizer=lambda t: list(t.encode()), tokenizer_name="b", eos=0
    )
    first, _ = next(iter(windows))
    assert bytes(first.tolist()) == b"text 0\0t"


def test_a_table_is_read_in_the_version_that_was_opened(tmp_path: Path) -> None:
    data = table(tmp_path).batch(COUNT)
    lance = importlib.import_module("lance")
    lance.dataset(str(tmp_path / "data.lance")).delete("y < 10")
    assert next(iter(data)).tolist() == list(range(COUNT))
    assert next(iter(table(tmp_path).batch(COUNT))).tolist() == list(range(10, COUNT))
    write_table(tmp_path / "data.lance", range(7, 27))  # anew, with versions of the same numbers
    assert next(iter(table(tmp_path).batch(COUNT))).tolist() == list(range(7, 27))


@pytest.mark.parametrize(
    ("package", "name", "extra"),
    [
        ("lance", "a.lance", "lance"),
        ("array_record.python.array_record_module", "a.array_record", "array-record"),
        ("pyarrow.parquet", "a.parquet", "parquet"),
    ],
)
def test_a_package_that_is_not_installed_is_named(
    package: str, name: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).touch()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"spartito\[{extra}\]"):
        sp.data.packed(tmp_path / name)
