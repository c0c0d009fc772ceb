"""``spartito data bench``: all rates are taken, and the sentence names the lowest."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spartito.data.packing.command import main_pack
from spartito.data.tools.bench import Rate, Rates, limits, main_bench
from tests.data.packed_files import write_all
from tests.data.web_server import serving

RATES = {"read_cold", "read_warm", "decode", "feed_cold", "feed_warm"}


def test_all_rates_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARTITO_CACHE", str(tmp_path / "cache"))
    for number in range(20):
        folder = tmp_path / "images" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.full((30, 40, 3), number, np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")
    (tmp_path / "images" / "a" / "0.jpg").write_bytes(b"broken")
    assert main_pack(str(tmp_path / "images"), str(tmp_path / "packed")) == 0
    write_all(tmp_path / "tokens", "jsonl", (30,))

    def rates(url: object) -> None:
        capsys.readouterr()
        assert main_bench(str(url), 0.1, batch_size=8, image_size=16, json=True) == 0
        facts = json.loads(capsys.readouterr().out)
        assert all(facts[rate]["per_second"] > 0 for rate in RATES)
        assert facts["read_cold"]["examples"] in (19, 20, 30)
        assert facts["limit"].startswith("In the first epoch ")

    for name in ("images", "packed", "tokens"):
        rates(tmp_path / name)
    with serving(tmp_path / "packed") as server:
        rates(server.url)
        assert max(server.ranges.values()) >= 3  # to be decoded, read cold, fed cold
    assert main_bench(str(tmp_path / "packed"), 0.1, image_size=16) == 0
    assert "decoded by one core" in capsys.readouterr().out
    assert main_bench(str(tmp_path / "nothing")) == 2


def test_the_sentence_names_what_limits() -> None:
    def said(cold: float, warm: float, fed: float, load: float = 0.0) -> str:
        first, later = (Rate(int(rate), 1.0, int(rate) * 1000) for rate in (cold, warm))
        feed = Rate(int(fed), 1.0)
        return limits(Rates(first, later, Rate(200, 2.0), feed, feed, 4, load), "store")

    assert said(100, 5000, 390) == (
        "In the first epoch the store limits: 100 examples a second arrive (100 kB/s), 4 cores "
        "could decode 400. Later decoding limits: 100 examples a second by each of 4 cores; the "
        "cache gives 5,000."
    )
    assert said(5000, 5000, 100).count("limits, but what makes batches") == 2
    assert said(5000, 5000, 390, load=3.0).endswith("(load 3.0): these figures are low.")
