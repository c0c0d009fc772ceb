"""Skips with a kind: `SPARTITO_REQUIRE` names the kinds that are failures here.

``SPARTITO_REQUIRE=docker,netns`` says that this machine has a container engine and network
namespaces: a test that is skipped for want of one of these fails instead. A skip without a kind
fails too where anything is required, so that no test can leave the list by accident.

What is installed and does not work, as ``scripts/trials`` tells it in ``SPARTITO_TEST_REFUSED``, is
skipped with its reason: a kernel that starts no container is no fault of ours.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import NoReturn

import pytest

from spartito import system

ENV = "SPARTITO_REQUIRE"
REFUSED = "SPARTITO_TEST_REFUSED"
KINDS = {
    "docker": "a container engine, and the image 'spartito' to begin with",
    "podman": "podman and podman-compose, and Docker's image 'spartito' to begin with",
    "netns": "network namespaces: root, iproute2, iptables",
    "ssh": "OpenSSH, client and server",
    "slurm": "Slurm's daemons, munge and namespaces, as root",
    "mpi": "mpirun",
    "mount": "the right to mount file systems",
    "cgroup": "a control group of our own that limits memory",
    "root": "root's rights",
    "linux": "what only Linux tells",
    "memory": "files in memory that processes share",
    "not-root": "a user without root's rights",
    "composer": "the composer in question: docker-compose, or docker's plugin",
    "data": "a folder of data that is not part of the sources",
    "dev": "a package of the extra 'dev'",
    "ray": "Ray, of the extra 'ray'",
    "clouds": "SkyPilot and dstack in an environment of their own: scripts/clouds",
    "stores": "servers of object stores in an environment of their own: scripts/stores",
    "tpu": "torch_tpu in an environment of its own: scripts/tpu",
    "libtpu": "Google's compiler for TPUs in an environment of its own: scripts/libtpu",
    "case": "a case that has nothing to test",
}
"""What a test may lack, by the word that its skip begins with."""


def need(kind: str) -> None:
    """Skip this test where ``scripts/trials`` found that ``kind`` does not work here."""
    if reason := refused(os.environ).get(kind):
        skip(kind, reason)


def lacks(kind: str, program: str) -> str:
    """Why tests of ``kind`` cannot run, which start ``program``; "" where they can."""
    missing = "" if shutil.which(program) else f"no {program} here"
    return refused(os.environ).get(kind, missing)


def refused(environment: Mapping[str, str]) -> dict[str, str]:
    """Why a kind that is installed does not work, by the kind, as ``scripts/trials`` found it."""
    lines = environment.get(REFUSED, "").splitlines()
    return dict(line.split(": ", 1) for line in lines if line)


def skip(kind: str, reason: object) -> NoReturn:
    """Skip this test because ``kind``, one of `KINDS`, is missing."""
    pytest.skip(_worded(kind, reason))


def skip_if(condition: bool, kind: str, reason: object) -> pytest.MarkDecorator:
    """The mark of tests that are skipped if ``condition`` holds, for want of ``kind``."""
    return pytest.mark.skipif(condition, reason=_worded(kind, reason))


def required(environment: Mapping[str, str]) -> frozenset[str]:
    """The kinds that `SPARTITO_REQUIRE` names.

    Raises `pytest.UsageError` for a word that is no kind.
    """
    words = {word.strip() for word in environment.get(ENV, "").split(",")} - {""}
    if unknown := sorted(words - set(KINDS)):
        known = ", ".join(sorted(KINDS))
        raise pytest.UsageError(f"{ENV} names {unknown[0]!r}; a test may need: {known}")
    return frozenset(words)


def kind_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The kind of a skip, or "" where it has none."""
    kind = reason_of(report).partition(":")[0]
    return kind if kind in KINDS else ""


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The kind and the reason, as the skip words them."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def enforce(
    report: pytest.TestReport | pytest.CollectReport, kinds: frozenset[str]
) -> pytest.TestReport | pytest.CollectReport:
    """The report, made a failure if it is a skip that ``kinds`` do not allow."""
    if not kinds or not report.skipped or hasattr(report, "wasxfail"):
        return report
    kind = kind_of(report)
    if kind in kinds:
        rule = f"{ENV} says that this machine has {KINDS[kind]}"
    elif not kind:
        rule = f"where {ENV} is set, a skip names its kind (tests/skips.py)"
    else:
        return report
    report.longrepr = f"skipped, but {rule}\n{reason_of(report)}"
    report.outcome = "failed"
    return report


def _worded(kind: str, reason: object) -> str:
    assert kind in KINDS, kind
    return f"{kind}: {reason}"


shares_memory = skip_if(not system.shares_memory(), "memory", "this system shares none")
on_linux = skip_if(not system.IS_LINUX, "linux", "this system does not tell")
