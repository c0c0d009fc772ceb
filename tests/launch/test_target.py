from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from spartito.cli import main
from spartito.errors import UserError
from spartito.launch.processes.local import MANY, MANY_PER_CORE, check_number
from spartito.launch.target import check_program

LIMIT = 60.0


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with programs and what is none; importing any of them would be an error."""
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "runs", "pack/inner", "pack/runs", "space"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("pack/__init__.py", "pack/inner/__init__.py", "pack/runs/__init__.py"):
        (tmp_path / name).write_text("raise SystemExit('imported')")
    for name in ("train.py", "runs/__main__.py", "pack/train.py", "pack/runs/__main__.py"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "module", "says"),
    [
        ("", False, "the name of the script is empty"),
        ("folder", False, "'folder' is a folder without a __main__.py"),
        ("trein.py", False, "Did you mean 'train.py'?"),
        ("mnist", False, "spartito train mnist"),
        ("", True, "the name of the module is empty"),
        ("pack", True, "'pack' is a package without a __main__.py"),
        ("pack.inner", True, "'pack.inner' is a package without a __main__.py"),
        ("pack.none", True, "no module named 'pack.none'"),
        ("train.more", True, "no module named 'train.more'"),
        ("pack..inner", True, "no module named"),
        ("__main__", True, "no module named '__main__'"),
        ("space", True, "'space' is a package without a __main__.py"),
    ],
)
def test_what_python_could_not_run_is_told(name: str, module: bool, says: str) -> None:
    with pytest.raises(UserError) as caught:
        check_program([name], module)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("train.py", False),
        ("runs", False),
        ("train", True),
        ("pack.train", True),
        ("pack.runs", True),
        ("json.tool", True),
    ],
)
def test_what_python_can_run_is_a_program(name: str, module: bool) -> None:
    check_program([name], module)


def test_far_more_processes_than_cores_are_asked_for_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "--workers", "100000", "train.py"]) == 2
    assert "100000 processes for the " in capsys.readouterr().err
    check_number(100000, 2, yes=True)
    check_number(MANY, 1, yes=False)
    check_number(MANY_PER_CORE * 100, 100, yes=False)
    with pytest.raises(UserError, match="cores of node7"):
        check_number(MANY_PER_CORE * 100 + 1, 100, yes=False, where="node7")


@pytest.mark.parametrize(("said", "code"), [("n\n", 2), ("\n", 2), ("y\n", 0)])
def test_a_terminal_is_asked(said: str, code: int) -> None:
    ours, theirs = pty.openpty()
    asks = (
        "import sys; from spartito.errors import UserError, show\n"
        "from spartito.launch.processes.local import check_number\n"
        "try: check_number(100000, 2, yes=False)\n"
        "except UserError as error: sys.exit(show(error))\n"
    )
    try:
        program = subprocess.Popen(
            [sys.executable, "-c", asks], stdin=theirs, stdout=theirs, stderr=theirs
        )
        with program:
            text = b""
            while b"[y/N] " not in text:
                text += os.read(ours, 4096)
            os.write(ours, said.encode())
            assert program.wait(LIMIT) == code
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["train.py", "--workers", "2"], "--workers behind train.py is the script's own"),
        (["train.py", "--workers=2"], "spartito run --workers ... train.py"),
        (["--workers", "1", "train.py", "--workers", "2"], ""),
        (["train.py", "--epochs", "2"], ""),
    ],
)
def test_an_option_behind_the_script_gets_a_hint(
    words: list[str], hint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *words]) == 0
    err = capfd.readouterr().err
    assert hint in err
    assert ("note" in err) == bool(hint)
