"""What runs all checks on a bare machine: it misses nothing silently, and requires what works."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import skips

ROOT = Path(__file__).parents[1]
HYBRID = "Error: OCI runtime error: crun: cgroups in hybrid mode not supported"
CALLED = 'echo "$0 $*" >>"$CALLS"\n'


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/bash\n{CALLED}{text}\n")
    file.chmod(0o755)


class Bare:
    """A machine whose programs are stand-ins: each notes that it was called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        self.calls.touch()
        for file in (".ci/run", "scripts/trials"):
            (folder / file).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / file, folder / file)
        for name in ("install", "clouds", "tpu", "libtpu", "stores", "engine", "test"):
            write(folder / "scripts" / name, "")
        for venv in (".venv", ".venv-podman"):
            write(folder / venv / "bin/python", "")
        for name in ("apt-get", "sleep", "docker", "podman", "podman-compose", "python3", "pidof"):
            write(folder / "bin" / name, "echo of-us")
        write(folder / "bin" / "id", "echo 0")

    def program(self, name: str, text: str) -> None:
        write(self.folder / name, text)

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return subprocess.run(
            words,
            cwd=self.folder,
            env={"PATH": path, "HOME": "/nonexistent", "CALLS": str(self.calls), **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def called(self, text: str) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if text in line]


@pytest.fixture
def bare(tmp_path: Path) -> Bare:
    return Bare(tmp_path)


def exports(text: str) -> dict[str, str]:
    """The variables that a text of ``scripts/trials`` sets."""
    words = subprocess.run(
        ["bash", "-c", f"{text}\nenv -0"], env={}, capture_output=True, text=True, check=True
    )
    return dict(line.split("=", 1) for line in words.stdout.split("\0") if line)


def test_what_a_kernel_refuses_is_not_required_and_has_its_reason(bare: Bare) -> None:
    bare.program(
        "bin/podman",
        f"""
        [ "$1" != run ] || {{ echo {shlex.quote(HYBRID)} >&2; exit 126; }}""",
    )
    bare.program("bin/catatonit", "")
    bare.program("bin/mpirun", "")
    done = bare.run("scripts/trials", "mpi", "podman", TRIAL_SECONDS="30")
    found = exports(done.stdout)
    assert found[skips.ENV] == "mpi"
    refused = skips.refused(found)
    assert refused.keys() == {"podman"}
    assert refused["podman"].startswith(HYBRID)
    assert "runc: " in refused["podman"]
    assert len(bare.called("podman run")) == 2  # by the usual runtime, and by runc
    assert bare.called("podman network rm")


def test_a_runtime_that_works_is_told_to_the_tests(bare: Bare) -> None:
    bare.program("bin/catatonit", "")
    bare.program("bin/podman", '[ "$1" != run ] || grep -q runc "$CONTAINERS_CONF"')
    found = exports(bare.run("scripts/trials", "podman", TRIAL_SECONDS="30").stdout)
    assert found[skips.ENV] == "podman"
    assert found["SPARTITO_TEST_PODMAN_RUNTIME"] == "runc"


def test_a_trial_that_does_not_end_is_given_up(bare: Bare) -> None:
    bare.program("bin/mpirun", "echo begins; exec /bin/sleep 100")
    found = exports(bare.run("scripts/trials", "mpi", TRIAL_SECONDS="1").stdout)
    assert found[skips.ENV] == ""
    assert skips.refused(found) == {"mpi": "no end within 1 s; last: begins"}


def test_a_kind_that_is_not_tried(bare: Bare) -> None:
    done = bare.run("scripts/trials", "dokcer")
    assert done.returncode == 2
    assert "'dokcer' is no kind that is tried" in done.stderr


@pytest.mark.parametrize(
    ("program", "text", "told"),
    [
        ("bin/apt-get", "exit 100", "iproute2"),
        ("bin/apt-get", '[[ "$*" != *podman* ]]', "podman"),
        ("scripts/clouds", "exit 1", "scripts/clouds"),
        ("scripts/install", "exit 1", "scripts/install"),
    ],
)
def test_what_cannot_be_fetched_fails_after_three_attempts(
    bare: Bare, program: str, text: str, told: str
) -> None:
    bare.program(program, text)
    done = bare.run("bash", ".ci/run")
    assert done.returncode == 1, done.stdout + done.stderr
    (last,) = done.stderr.splitlines()[-1:]
    assert "cannot be fetched, so its tests would not run: " in last
    assert told in last
    assert "attempt 3 of 3 failed" in done.stdout
    assert len(bare.called("sleep")) == 2
    assert not bare.called("scripts/test")


def test_the_last_lines_name_what_did_not_run(bare: Bare) -> None:
    bare.program(
        "scripts/trials",
        """
        echo 'export SPARTITO_REQUIRE=netns'
        told=$'podman: crun: no: hybrid\\nslurm: no job ran\\n'
        printf 'export SPARTITO_TEST_REFUSED=%q\\n' "$told" """,
    )
    lines = "netns: a\npodman: crun: no: hybrid\npodman: crun: no: hybrid"
    bare.program("scripts/test", f'echo "{lines}" >>"${{3#*=}}"')
    done = bare.run("bash", ".ci/run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "required: netns\n" in done.stdout
    assert done.stdout.splitlines()[-2:] == [
        "not tested here: podman: crun: no: hybrid (2 tests did not run)",
        "not tested here: slurm: no job ran (0 tests did not run)",
    ]


def test_a_failure_of_tests_is_the_end_of_the_run(bare: Bare) -> None:
    bare.program("scripts/trials", "echo export SPARTITO_TEST_REFUSED=")
    bare.program("scripts/test", "exit 3")
    assert bare.run("bash", ".ci/run").returncode == 3
    assert bare.called("python -m tests.ps.simulation")
