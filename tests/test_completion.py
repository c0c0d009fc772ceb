"""The TAB key: what may stand at the cursor, in real shells too, and what is installed for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spartito.cli import main
from spartito.cli.app import application
from spartito.cli.completion import BASH, ENV_COMPLETE, ENV_LINE, MARK, found
from spartito.registry import BUILT_IN

LIMIT = 60.0


@pytest.mark.parametrize(
    ("typed", "word", "offered"),
    [
        ([], "tr", ["train"]),
        ([], "--ver", ["--version"]),
        (["data"], "ch", ["check"]),
        (["run"], "--mast", ["--master-addr"]),
        (["run"], "--strategy=mir", ["--strategy=mirrored"]),
        (["run", "--strategy"], "mir", ["mirrored"]),
        (["run", "--strategy"], "local_sgd(ev", ["local_sgd(every="]),
        (["run", "--strategy"], "local_sgd(every=2, in", ["local_sgd(every=2, inside="]),
        (["run", "--strategy"], "local_sgd(inside=mir", ["local_sgd(inside=mirrored"]),
        (["run", "--strategy"], "local_sgd(inside=sharded(zer", ["local_sgd(inside=sharded(zero="]),
        (
            ["run", "--strategy"],
            "local_sgd(inside=mesh(zero=1, model=2), sit",
            [
                "local_sgd(inside=mesh(zero=1, model=2), sites=",
            ],
        ),
        (["compare", "mnist", "--strategies"], "tpu, mir", ["tpu, mirrored"]),
        (["compare", "mnist", "--strategies"], "mesh(zero=1),mir", ["mesh(zero=1),mirrored"]),
        (["train"], "", ["cats_vs_dogs", "gpt", "mnist"]),
        (["train", "mnist", "--precision"], "bf16-t", ["bf16-true"]),
        (["compare"], "mn", ["mnist", ""]),  # or a script
        (["strategies"], "sh", ["sharded"]),
        (["run", "--log-dir"], "lo", [""]),
        (["run", "train.py"], "--str", [""]),  # the script's own
        (["run", "--workers"], "", []),
        (["run", "-m"], "", [""]),
        (["nothing"], "", []),
    ],
)
def test_what_may_stand_there(typed: list[str], word: str, offered: list[str]) -> None:
    assert [text for text, _ in found(typed, word, application)] == offered


def test_every_strategy_and_all_of_its_options() -> None:
    words = [text for text, _ in found(["run", "--strategy"], "", application)]
    assert words == [*BUILT_IN]
    words = [text for text, _ in found(["run", "--strategy"], "mesh(", application)]
    assert words == [f"mesh({option}=" for option in BUILT_IN["mesh"].options or ()]


def test_it_imports_no_torch_and_one_command_alone() -> None:
    code = (
        "import sys; from spartito.cli import main\n"
        "assert main([]) == 0\n"
        "print([m for m in sys.modules if m in ('torch', 'numpy', 'rich') or 'cli.compare' in m])"
    )
    env = {**os.environ, ENV_COMPLETE: "bash", ENV_LINE: "spartito run --strat"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, env=env
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert done.stdout.splitlines()[0].startswith("--strategy\tHow tasks train together")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("spartito tra", ["train"]),
        ("spartito run --strategy=mir", ["mirrored"]),  # what stands behind the "=" is its word
        ("spartito run --strategy 'local_sgd(ev", ["local_sgd(every=", "local_sgd(every=..."]),
        ("spartito predict ru", ["runs"]),
    ],
)
def test_bash_gets_the_words(line: str, offered: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    command = tmp_path / "spartito"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m spartito "$@"\n')
    command.chmod(0o755)
    script = f"""
    compopt() {{ :; }}  # which works while a key is handled alone
    {BASH}
    COMP_LINE=$1 COMP_POINT=${{#1}}
    _spartito {command} "${{1##*[ =\\']}}"
    printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", line],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        cwd=tmp_path,
    )
    assert (done.stdout.splitlines(), done.stderr) == (offered, "")


def test_a_users_settings_get_one_line_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("SHELL", "/bin/bash")
    own = tmp_path / ".bashrc"
    own.write_text("alias ll='ls -l'")  # without a line's end
    for _ in range(2):
        assert main(["--install-completion"]) == 0
    script = tmp_path / ".local/share/bash-completion/completions/spartito"
    assert own.read_text() == f"alias ll='ls -l'\n[ ! -f {script} ] || source {script}  {MARK}\n"
    assert script.read_text() == BASH
    out = capsys.readouterr().out
    assert f"wrote {script}" in out
    assert f"added a line to {own}" in out
    assert f"{own} has its line already" in out


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_scripts_of_their_own(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HOME", "ZDOTDIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    (tmp_path / "zdotdir").mkdir()
    assert main(["--show-completion", shell]) == 0
    script = capsys.readouterr().out.strip()
    assert main(["--install-completion", shell]) == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.read_text().strip() == script for path in files)
    assert len(files) == {"zsh": 2, "fish": 1}[shell]


def test_a_file_of_anothers_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    script = tmp_path / "fish/completions/spartito.fish"
    script.parent.mkdir(parents=True)
    script.write_text("mine")
    assert main(["--install-completion", "fish"]) == 2
    assert script.read_text() == "mine"
    assert "Spartito did not write it" in capsys.readouterr().err
    assert main(["--show-completion", "tcsh"]) == 2
    assert "'tcsh' is not a shell that completes" in capsys.readouterr().err
