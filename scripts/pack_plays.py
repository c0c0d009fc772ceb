"""Pack six plays by Shakespeare into the one text that the package ships.

Usage: python scripts/pack_plays.py DIR [FILE.txt.gz]

``DIR`` has the files ``*_gut.txt`` of the Python package ``shakespeare`` 0.6 (shksprdata/texts).
"""

from __future__ import annotations

import argparse
import gzip
import re
from pathlib import Path

from spartito.data.sets.text import FILE

PACKAGED = Path(__file__).parents[1] / "src/spartito/data" / FILE
PLAYS = ("hamlet", "julius_caesar", "lear", "macbeth", "othello", "romeo_and_juliet")
"""In this order; the last tenth, which validates, lies in the last one."""


def play(text: str) -> str:
    """A play from its first act on, without blanks at the ends of lines and rows of empty lines."""
    acts = text[re.search(r"^ACT I\b", text, re.MULTILINE | re.IGNORECASE).start() :]  # type: ignore[union-attr]
    lines = "\n".join(line.rstrip() for line in acts.splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines).removesuffix("THE END").strip() + "\n\n"


def pack(directory: Path, target: Path) -> None:
    """Write the plays that lie in ``directory`` to ``target``, always the same bytes."""
    texts = [(directory / f"{name}_gut.txt").read_text(encoding="ascii") for name in PLAYS]
    whole = "".join(map(play, texts)).encode("ascii")
    target.write_bytes(gzip.compress(whole, 9, mtime=0))
    print(f"{target}: {len(whole)} characters, {target.stat().st_size} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("target", type=Path, nargs="?", default=PACKAGED)
    arguments = parser.parse_args()
    pack(arguments.directory, arguments.target)
