from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from spartito.cli import main
from spartito.errors import PREFIX
from tests.commands import Ended, commands_in

LIMIT = 60.0


def spartito(*arguments: str, env: Mapping[str, str] | None = None) -> Ended:
    with commands_in(Path.cwd()) as commands:
        return commands.spartito(*arguments, env=env)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["run"],
        ["train"],
        ["predict"],
        ["doctor"],
        ["data", "check"],
        ["checkpoint", "show"],
        ["checkpoint", "average"],
    ],
)
def test_every_command_has_help_with_an_example(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--help"]) == 0
    assert f"Example: spartito {' '.join(words)}" in " ".join(capsys.readouterr().out.split())


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("spartito 0.")


@pytest.mark.parametrize(
    "words",
    [
        ["nothing"],
        ["run"],
        ["run", "--workers", "0", "x.py"],
        ["run", "--workers", "two", "x.py"],
        ["run", "--ps", "0", "x.py"],
        ["run", "--ps", "-1", "x.py"],
        ["run", "--slow", "worker:0", "x.py"],
        ["train", "mnist", "--ps", "two"],
        ["train", "mnist", "--ps", "1", "--strategy", "mirrored"],
        ["train", "mnist", "--chief"],
        ["train", "mnist", "--strategy", "parameter_server"],
        ["train", "mnist", "--epochs", "0"],
        ["train", "mnist", "--precision", "fp8"],
        ["train", "mnits"],
        ["run", "no_such.py"],
        ["data", "check", "x", "--remove", "--move-to", "y"],
        ["data", "check", "no_such_folder"],
    ],
)
def test_a_mistake_is_one_message_and_code_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert err
    assert "Traceback" not in out + err


def test_an_unknown_recipe_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "cats_vs_dog"]) == 2
    assert "'cats_vs_dogs'" in capsys.readouterr().err


def test_everything_after_the_script_is_the_scripts(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text("import sys; print(sys.argv[1:])")
    given = ["--workers", "9", "-m", "--", "--help", "x"]
    got = spartito("run", "--workers", "1", str(script), *given)
    assert (got.code, got.out) == (0, f"{given}\n")


def test_a_module_runs_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "my_part.py").write_text("import sys; print(sys.argv[1:])")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    got = spartito("run", "-m", "my_part", "--a", "1", env={"PYTHONPATH": path})
    assert (got.code, got.out) == (0, "['--a', '1']\n")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_users_mistake_in_a_script_is_told_once(tmp_path: Path, workers: str) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(
        "from spartito.errors import UserError, install_excepthook\n"
        "install_excepthook()\n"
        "raise UserError('the batch 1 is too small', 'Give more.')\n"
    )
    got = spartito("run", "--workers", workers, str(script))
    assert got.code == 2
    assert got.err.count(PREFIX) == 1  # a note about few cores may come before it
    assert got.err.endswith(f"{PREFIX}the batch 1 is too small\n  Give more.\n")


def test_a_mistake_is_told_once_where_torch_holds_stderr_back(tmp_path: Path) -> None:
    """torch's init_process_group replaces the exception hook by one that prints afterwards."""
    script = tmp_path / "wrong.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "import spartito\n"
        "store = dist.HashStore()\n"
        "dist.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "raise spartito.UserError('the batch 1 is too small', 'Give more.')\n"
    )
    got = spartito("run", "--workers", "1", str(script))
    assert got.code == 2
    assert got.err.count(f"{PREFIX}the batch 1 is too small\n  Give more.\n") == 1


def test_the_scripts_own_code_comes_through(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text("raise SystemExit(7)")
    assert spartito("run", "--workers", "2", str(script)).code == 7


def test_the_launcher_does_without_torch(tmp_path: Path) -> None:
    script = tmp_path / "empty.py"
    script.touch()
    code = (
        "import sys; from spartito.cli import main\n"
        f"assert main(['run', '--workers', '2', {str(script)!r}]) == 0\n"
        "assert main(['--help']) == 0\n"
        "print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    )
    got = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert got.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("module", ["spartito", "spartito.errors", "spartito.cli.app"])
def test_ctrl_c_while_the_command_is_imported_leaves_no_traceback(module: str) -> None:
    code = (
        "import os, signal, sys\n"
        "class CtrlC:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, CtrlC())\n"
        "from spartito_command import main\n"
        "sys.exit(main())"
    )
    got = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT
    )
    assert (got.returncode, got.stdout, got.stderr) == (130, "", "")


def test_another_system_is_refused_in_one_sentence() -> None:
    other = "import sys; sys.platform = 'win32'; import spartito"
    got = subprocess.run(
        [sys.executable, "-c", other], capture_output=True, text=True, timeout=LIMIT
    )
    assert got.returncode == 2
    assert got.stderr.startswith(f"{PREFIX}Spartito runs on Linux and macOS, and this is win32\n")
    assert "Traceback" not in got.stderr
