"""Starts the processes of a benchmark, all in one environment, and brings back what they found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from spartito.launch.processes.local import MALLOC, Position, environments, role_environments
from spartito.launch.processes.roles import Roles
from spartito.names import (
    ENV_EPOCHS,
    ENV_RUN_DIR,
    ENV_SNAPSHOT_DIR,
    ENV_STRATEGY,
    ENV_STRATEGY_OPTIONS,
)
from spartito.wire.ports import free_port

ROOT = Path(__file__).parents[1]
NOT_OURS = (
    *(ENV_EPOCHS, ENV_RUN_DIR, ENV_SNAPSHOT_DIR, ENV_STRATEGY, ENV_STRATEGY_OPTIONS),
    *("TF_CONFIG", *MALLOC),
)


def run_job(
    program: Sequence[str],
    *,
    workers: int,
    python: str = sys.executable,
    malloc: bool = True,
    limit: float = 300.0,
    env: Mapping[str, str] | None = None,
) -> Any:
    """Run ``python *program`` as ``workers`` processes; returns the JSON of rank 0's last line.

    Each gets what `spartito run` gives: torchrun's variables, one thread, the malloc settings
    (without ``malloc`` glibc's own). Whoever is not ours gets the same. Ends the program with
    what a process said if it fails or outlives ``limit`` seconds.
    """
    position = Position(0, 1, "127.0.0.1", free_port())
    told = environments(_base(env), position, workers)
    return _run([python, *program], _malloc(told, malloc), limit, ends_alone=False)


def run_roles(
    program: Sequence[str],
    *,
    roles: Roles,
    python: str = sys.executable,
    malloc: bool = True,
    limit: float = 300.0,
    env: Mapping[str, str] | None = None,
    ends_alone: bool = False,
) -> Any:
    """As `run_job`, but each process is a task of ``roles`` and reads that in its `TF_CONFIG`.

    Returns the JSON of the leading task's last line. With ``ends_alone`` the others never end
    by themselves: they are stopped when the leading one has ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = role_environments({**_base(env), ENV_SNAPSHOT_DIR: folder}, roles)
        return _run([python, *program], _malloc(told, malloc), limit, ends_alone)


def run_quietly(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    limit: float = 300.0,
    folder: Path = ROOT,
) -> str:
    """Run ``python *command`` in ``folder`` and a session of its own; returns its stdout.

    Ends the program with what it said if it fails or outlives ``limit`` seconds.
    """
    end_by_exception()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=_base(env),
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        code = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit)
        finally:
            if process.poll() is None:
                process.terminate()  # `spartito` ends what it started
                with suppress(subprocess.TimeoutExpired):
                    process.wait(30.0)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for file in (out, err):
            file.seek(0)
        if code != 0:
            ended = f"took {limit:g} s" if code is None else f"ended with {code}"
            said = f"{out.read()[-4000:]}{err.read()[-4000:]}"
            sys.exit(f"{' '.join(command)} {ended}\n{said}")
        return out.read()


def _base(env: Mapping[str, str] | None) -> dict[str, str]:
    """Our environment without what belongs to another job; one thread."""
    base = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
    return base | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(env or {})}


def _malloc(told: Sequence[dict[str, str]], keep: bool) -> list[dict[str, str]]:
    """The environments with our malloc settings, or without."""
    return [{k: v for k, v in one.items() if keep or k not in MALLOC} for one in told]


def _run(
    command: Sequence[str], told: Sequence[Mapping[str, str]], limit: float, ends_alone: bool
) -> Any:
    """Run ``command`` in each environment; returns the JSON of the first one's last line."""
    end_by_exception()
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank, variables in enumerate(told):
            with (
                open(f"{folder}/{rank}.out", "wb") as out,
                open(f"{folder}/{rank}.err", "wb") as err,
            ):
                processes.append(
                    subprocess.Popen(command, cwd=ROOT, env=variables, stdout=out, stderr=err)
                )
        failed = _wait(processes, limit, ends_alone)
        if failed is not None:
            said = Path(folder, f"{failed}.err").read_text(errors="replace")
            sys.exit(
                f"{' '.join(command)}: process {failed} failed or took {limit:g} s\n{said[-4000:]}"
            )
        lines = Path(folder, "0.out").read_text().splitlines()
    return json.loads(lines[-1])


def end_by_exception() -> None:
    """So that a SIGTERM ends the job too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], limit: float, ends_alone: bool
) -> int | None:
    """Wait for all (with ``ends_alone`` for the first); returns the first that failed.

    None is left running.
    """
    end = time.monotonic() + limit
    try:
        while True:
            codes = [process.poll() for process in processes]
            for rank, code in enumerate(codes):
                if code or (code is None and time.monotonic() > end):
                    return rank
            if None not in codes or (ends_alone and codes[0] == 0):
                return None
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
