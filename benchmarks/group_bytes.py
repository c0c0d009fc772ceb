"""Bytes that leave a machine per update, two groups of one worker: exact sums, and meetings."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import Figure, announce, conclude, parser
from benchmarks.launching import run_quietly

TARGETS = {"local": 20.0, "local 4bit": 150.0}
"""By how many times fewer they are, with a meeting after each twentieth update."""
SIDES = ("exact", "local", "local 8bit", "local 4bit")


def main() -> None:
    """Print the bytes, and how many times fewer they are."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=1)
    options.add_argument("--model", choices=("mlp", "xception"), default="mlp")
    given = options.parse_args()
    here = announce(__doc__)
    found = {side: measure(side, given.model) for side in SIDES}
    figures = [Figure(f"{side}, bytes per update", found[side], measure="bytes") for side in SIDES]
    figures += [
        Figure(f"exact / {side}", found["exact"] / found[side], TARGETS.get(side))
        for side in SIDES[1:]
    ]
    conclude(here, figures, given.json, bytes=found)


def measure(side: str, model: str) -> float:
    """What rank 0 sent per update of twenty, from one meeting to the next; losses included."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        job = ["-m", "benchmarks.jobs.group_bytes", side, model]
        launch = ["-m", "spartito", "run", "--workers=2"]
        run_quietly([*launch, *job, f"--out={out}"])
        found: Any = json.loads(out.read_text())
    return float(found)


if __name__ == "__main__":
    main()
