"""What is built of the sources is whole: all files are in it, and it trains where they are not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMIT = 240.0
PYTHONS = [f"python3.{minor}" for minor in range(11, 20)]
"""Those that are tried where they are here."""


def run(
    *words: str | Path, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    ours = ("PYTHONPATH", "PYTHONWARNINGS")  # pip warns of itself
    plain = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**plain, **(env or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def tracked() -> list[str]:
    listed = run("git", "ls-files", cwd=ROOT)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the source distribution, from which the wheel was built."""
    sources, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("built")
    for name in tracked():
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, sources / name)
    words = (sys.executable, "-m", "build", "--no-isolation", "--outdir", out, sources)
    done = run(*words, cwd=sources)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel; what it needs is that of this environment."""
    fresh = tmp_path_factory.mktemp("fresh")
    assert run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=fresh).returncode == 0
    python = fresh / "venv/bin/python"
    [wheel] = built.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", python, "install")
    done = run(*pip, "--no-deps", "--no-index", "--no-compile", wheel, cwd=fresh)
    assert done.returncode == 0, done.stderr
    [packages] = fresh.glob("venv/lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return fresh


@pytest.mark.slow
def test_every_file_of_the_package_is_in_the_wheel(built: Path) -> None:
    [wheel], [sources] = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        about = message_from_string(file.read(metadata).decode())
    ours = {name.removeprefix("src/") for name in tracked() if name.startswith("src/")}
    assert ours <= names
    assert {name for name in names if ".dist-info/" not in name} == ours
    kinds = about.get_all("Classifier") or []
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.14"} <= set(kinds)
    with tarfile.open(sources) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"} <= found
    assert not any(name.startswith("tests") for name in found)


@pytest.mark.slow
def test_the_wheel_trains_outside_of_the_sources(installed: Path) -> None:
    spartito = installed / "venv/bin/spartito"
    done = run(spartito, "train", "mnist", "--epochs", "1", "--out", "run", "--json", cwd=installed)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["val_accuracy"] > 0.8
    assert (installed / "run/report.html").is_file()
    done = run(spartito, "cluster", "compose", "mnist", "--workers", "2", cwd=installed)
    assert "services:" in done.stdout
    code = "import spartito; print(spartito.__file__)"
    done = run(installed / "venv/bin/python", "-c", code, cwd=installed)
    assert done.stdout.startswith(f"{installed}/venv/lib/")


@pytest.mark.slow
def test_every_python_here_can_read_the_wheel(built: Path, tmp_path: Path) -> None:
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    found = [each for each in map(shutil.which, PYTHONS) if each and _works(each, tmp_path)]
    for python in [sys.executable, *found]:
        done = run(python, "-m", "compileall", "-q", "-f", "spartito", cwd=tmp_path)
        assert done.returncode == 0, f"{python}: {done.stdout}"


def _works(python: str, folder: Path) -> bool:
    """Whether it is more than the name of one that is not installed."""
    return run(python, "-c", "import zlib", cwd=folder).returncode == 0


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The sources as they are, in a repository of their own."""
    made = tmp_path / "clone"
    for name in tracked():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, made / name)
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "-m", "all"]):
        assert _git(made, *words).returncode == 0
    return made


def _git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    who = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    return run("git", *who, *words, cwd=folder)


def test_a_release_is_refused_before_anything_is_done(clone: Path) -> None:
    def said(*words: str) -> str:
        done = run("scripts/release", *words, cwd=clone, env={"DEPENDENCIES": "/nowhere"})
        assert done.returncode == 2
        assert not (clone / "dist").exists()
        return done.stderr

    assert "'next' is no version; write it as 0.2.0" in said("next")
    assert "CHANGELOG.md has a section 0.1.0 already" in said("0.1.0")
    _git(clone, "tag", "v9.9.9")
    assert "there is a tag v9.9.9 already" in said("9.9.9")
    (clone / "mine").touch()
    assert "there are changes that are not committed" in said("9.9.8")


@pytest.mark.night
@pytest.mark.slow
def test_a_release_is_built_tried_committed_and_tagged(clone: Path) -> None:
    _git(clone, "config", "user.name", "Test")
    _git(clone, "config", "user.email", "test@example.org")
    env = {"DEPENDENCIES": sysconfig.get_path("purelib"), "PYTHON": sys.executable}
    done = run("scripts/release", "9.9.9", cwd=clone, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in (clone / "dist").iterdir()) == [
        *("spartito-9.9.9-py3-none-any.whl", "spartito-9.9.9-site.tar.gz", "spartito-9.9.9.tar.gz"),
    ]
    assert _git(clone, "describe", "--exact-match").stdout.strip() == "v9.9.9"
    assert _git(clone, "status", "--porcelain").stdout == ""
    assert "\n## 9.9.9 (" in (clone / "CHANGELOG.md").read_text()
    again = run("scripts/release", "9.9.10", cwd=clone, env=env)
    assert "nothing under '## Unreleased'" in again.stderr
