"""Pack MNIST's two t10k IDX files into the one file of digits that the package ships.

Usage: python scripts/pack_digits.py DIR [FILE.npz]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from spartito.data.sets.idx_format import find_idx
from spartito.data.sets.packaged import FILE

PACKAGED = Path(__file__).parents[1] / "src/spartito/data" / FILE


def pack(directory: Path, target: Path) -> None:
    """Write the test images and labels that lie in ``directory`` to ``target``."""
    x, y = find_idx(directory, "test")
    np.savez_compressed(target, x=x, y=y.astype(np.uint8))
    print(f"{target}: {len(x)} digits, {target.stat().st_size} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("target", type=Path, nargs="?", default=PACKAGED)
    arguments = parser.parse_args()
    pack(arguments.directory, arguments.target)
