from __future__ import annotations

import subprocess
import sys

import pytest

from spartito.comparison.load import (
    Reading,
    busy_seconds,
    load_between,
    load_of,
    pressure_seconds,
    read_load,
)
from tests.commands import LIMIT
from tests.skips import on_linux

STAT = """cpu  400 40 80 9000 7 5 6 20 0 0
cpu0 100 10 20 900 7 5 6 4 0 0
cpu1 300 30 60 100 0 0 0 16 0 0
intr 1 2 3
"""


def test_only_our_cores_count_and_stolen_time_does() -> None:
    assert busy_seconds(STAT, [0], 100) == 1.34
    assert busy_seconds(STAT, [0, 1], 100) == pytest.approx(5.4)
    with pytest.raises(ValueError, match="no core 7"):
        busy_seconds(STAT, [7], 100)


def test_how_long_something_waited() -> None:
    some = "some avg10=71.24 avg60=65.08 avg300=34.41 total=170848206\n"
    assert pressure_seconds(some + "full avg10=0.00 total=0\n") == 170.848206
    with pytest.raises(ValueError, match="'some'"):
        pressure_seconds("full avg10=0.00 total=0\n")


def read(time: float, busy: float, own: float, pressure: float | None = 0.0) -> Reading:
    return Reading(time, busy, own, pressure)


def test_what_others_took_is_what_was_not_ours() -> None:
    load = load_of(read(10, 5, 1, 2), read(20, 23, 11, 7), cores=2, ours=2)
    assert load.own == 1.0
    assert load.others == pytest.approx(0.4)  # 8 of 20 seconds of two cores
    assert load.pressure == 0.5
    assert load_of(read(0, 0, 0), read(10, 9, 10), cores=2, ours=2).others == 0.0


def test_others_beside_a_small_container_take_nothing_from_it() -> None:
    busy = read(10, 300, 20)
    assert load_of(read(0, 0, 0), busy, cores=64, ours=2).others == 0.0
    full = read(10, 650, 20)  # 63 of 64 cores are others'
    assert load_of(read(0, 0, 0), full, cores=64, ours=2).others == 0.5


def test_no_reading_is_no_load() -> None:
    assert load_between(None, read(1, 1, 1)) is None
    assert load_of(read(0, 0, 0, None), read(1, 1, 1), 2, 2).pressure is None


@on_linux
def test_what_a_child_computed_is_ours() -> None:
    before = read_load()
    code = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT)
    load = load_between(before, read_load())
    assert before is not None
    assert load is not None
    after = read_load()
    assert after is not None
    assert after.own - before.own >= 0.5
    assert 0 <= load.others <= 1
