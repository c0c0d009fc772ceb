"""The digits that ship with the package are MNIST's test set, whole and in order."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np

from spartito.data.sets.idx_format import find_idx
from spartito.data.sets.packaged import load_digits, split_digits
from tests.skips import skip_if

ROOT = Path(__file__).parents[2]
SOURCE = ROOT.parent / "shared" / "data" / "mnist"


def test_all_digits_are_there() -> None:
    x, y = load_digits()
    assert x.shape == (10_000, 28, 28)
    assert y.shape == (10_000,)
    assert x.dtype == np.uint8
    assert y.dtype == np.int64
    assert np.bincount(y).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert y[:5].tolist() == [7, 2, 1, 0, 4]
    assert hashlib.sha256(x.tobytes()).hexdigest() == (
        "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161"
    )


def test_the_split_is_whole_and_fair() -> None:
    (train_x, train_y), (val_x, val_y) = split_digits()
    x, y = load_digits()
    assert (len(train_x), len(val_x)) == (8_000, 2_000)
    assert np.array_equal(np.concatenate([train_x, val_x]), x)
    assert np.array_equal(np.concatenate([train_y, val_y]), y)
    for part in (train_y, val_y):
        shares = np.bincount(part) / len(part)
        assert shares.min() > 0.08
        assert shares.max() < 0.12


@skip_if(not SOURCE.is_dir(), "data", "the IDX files that it was made from are absent")
def test_the_packaged_file_can_be_made_again(tmp_path: Path) -> None:
    target = tmp_path / "digits.npz"
    command = [sys.executable, "scripts/pack_digits.py", str(SOURCE), str(target)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    wanted, labels = find_idx(SOURCE, "test")
    x, y = load_digits()
    with np.load(target) as made:
        assert made["x"].tobytes() == x.tobytes() == wanted.tobytes()
        assert made["y"].tolist() == y.tolist() == labels.tolist()


def test_source_and_licence_lie_beside_the_data() -> None:
    text = (ROOT / "src/spartito/data/files/README.md").read_text()
    for word in ("LeCun", "Cortes", "Burges", "CC BY-SA 3.0", "pack_digits.py"):
        assert word in text
