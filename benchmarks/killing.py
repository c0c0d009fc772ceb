"""A job of `spartito run` of which one task is killed on its way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.launching import ROOT

LIMIT = 110.0
"""Seconds for the whole job, and for its tasks to begin."""


def run_killing(
    words: Sequence[str],
    folder: Path,
    victim: str | None,
    begun: Sequence[str],
    after: float,
) -> float:
    """Run ``spartito run *words`` to its end, which has to be good; returns when it was killed.

    Tasks write ``NAME.pid`` and, as they train, ``NAME.began`` into ``folder``. ``victim`` is
    killed ``after`` seconds from when all of ``begun`` train; without one the time is infinite.
    """
    command = [sys.executable, "-m", "spartito", "run", *words]
    env = {**os.environ, "BENCHMARK_FOLDER": str(folder), "SPARTITO_SNAPSHOT_DIR": str(folder)}
    out, when = folder / "out.txt", float("inf")
    with out.open("w") as file:
        job = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file)
        try:
            if victim is not None:
                _wait(job, [folder / f"{name}.began" for name in begun], out)
                time.sleep(after)
                when = time.monotonic()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int((folder / f"{victim}.pid").read_text()), signal.SIGKILL)
            code = job.wait(LIMIT)
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait(30.0)
    if code:
        sys.exit(f"the job ended with {code}:\n{out.read_text()[-4000:]}")
    return when


def _wait(job: subprocess.Popen[bytes], files: Sequence[Path], out: Path) -> None:
    end = time.monotonic() + LIMIT
    while not all(file.exists() for file in files):
        if job.poll() is not None or time.monotonic() > end:
            sys.exit(f"the job did not begin:\n{out.read_text()[-4000:]}")
        time.sleep(0.02)
