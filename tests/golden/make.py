"""Writes the checkpoints that every later version must read: ``python -m tests.golden.make``.

Once per format, into ``tests/golden/format-N``; what is there already is not written again.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from spartito.storage.atomic import FORMAT
from tests.replicas import Replicas
from tests.strategies import jobs
from tests.strategies.test_contracts import CASES, Case, named, servers

HERE = Path(__file__).parent
WRITERS = [
    next(case for case in CASES if case[0] == name)
    for name in ("one_device", "mirrored", "central_storage", "parameter_server")
]


def main() -> None:
    folder = HERE / f"format-{FORMAT}"
    folder.mkdir()
    replicas = Replicas()
    try:
        for case in WRITERS:
            _write(replicas, case, folder / named(case))
        _write(replicas, WRITERS[1], folder / "accumulated", accumulate=2)
    finally:
        replicas.close()


def _write(replicas: Replicas, case: Case, folder: Path, accumulate: int = 1) -> None:
    name, world_size, options = case
    job = partial(
        jobs.checkpoint_and_resume, folder=str(folder), phase="save", accumulate=accumulate
    )
    replicas(job, world_size, name, options, servers=servers(case))


if __name__ == "__main__":
    main()
