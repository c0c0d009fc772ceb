"""Tests start from a known state, and so do the processes that they start.

Without this a suite that is started in the background ignores SIGINT, and so do its children;
one that is started under ``umask 077`` makes files that no container can read; and whoever has
set ``OMP_NUM_THREADS``, ``LANG`` or ``SLURM_JOB_ID`` has other results than everybody else.
"""

from __future__ import annotations

import locale
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

UMASK = 0o022
WARNINGS = {"PYTHONWARNINGS": "error"}
"""As ``filterwarnings`` of pytest, in all Python programs that tests start."""
FIXED = {"LC_ALL": "C.UTF-8", "TZ": "UTC", **WARNINGS}

KEPT = (
    *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "USER", "LOGNAME"),
    *("CUDA_", "NVIDIA_", "PIP_", "SSL_", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "DOCKER_"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    *("PYTEST_", "HYPOTHESIS_", "COVERAGE_", "COV_", "SPARTITO_REQUIRE", "SPARTITO_TEST_"),
    "SPARTITO_PORTABLE",
)
"""Which variables stay, by how their names begin: where programs are, and what pytest is told."""

OF_TOOLS = {"DOCKER_CONFIG": ".docker", "GIT_CONFIG_GLOBAL": ".gitconfig"}
"""What tools read in the user's home, by the variable that says where it is instead."""

LEAN = Path(__file__).with_name("lean")
"""On the path of all Python programs that tests start."""

OWN_HOME = "SPARTITO_TEST_HOME"
"""The home that tests have; a suite that a test starts has that of the test."""

_made: list[str] = []

PYTHONS_OWN = {signal.SIGPIPE, signal.SIGXFSZ}
"""The interpreter ignores these, and restores them in its children."""


def begin() -> None:
    """Put signals, umask and environment of this process into the known state."""
    for number in signal.valid_signals() - PYTHONS_OWN:
        if signal.getsignal(number) == signal.SIG_IGN:
            is_int = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_int else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(UMASK)
    if not (home := os.environ.get(OWN_HOME, "")):
        home = tempfile.mkdtemp(prefix="spartito-home-", dir="/tmp")
        _made.append(home)
    clean = environment(os.environ, home)
    os.environ.clear()
    os.environ.update(clean)
    locale.setlocale(locale.LC_CTYPE, "")  # as at the start of a process
    tempfile.tempdir = None  # asked again, without TMPDIR


def environment(found: Mapping[str, str], home: str) -> dict[str, str]:
    """What is left of the environment ``found``, and ``home`` as the home."""
    kept = {name: value for name, value in found.items() if name.startswith(KEPT)}
    old = Path(found.get("HOME", "/nonexistent"))
    tools = {name: str(old / file) for name, file in OF_TOOLS.items() if (old / file).exists()}
    path = with_lean(found.get("PYTHONPATH", ""))
    return {**tools, **kept, **FIXED, "PYTHONPATH": path, "HOME": home, OWN_HOME: home}


def with_lean(path: str) -> str:
    """``PYTHONPATH`` as ``path``, with `LEAN` before all that is there, if it is not."""
    found = [each for each in path.split(os.pathsep) if each]
    return os.pathsep.join(found if str(LEAN) in found else [str(LEAN), *found])


def of_others() -> dict[str, str]:
    """The environment for programs of others, which may warn as they like."""
    return {name: value for name, value in os.environ.items() if name not in WARNINGS}


def end() -> None:
    """Remove the home that `begin` made."""
    for home in _made:
        shutil.rmtree(home, ignore_errors=True)
