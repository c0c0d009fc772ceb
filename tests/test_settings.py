"""``spartito.toml`` and ``[tool.spartito]``: what they say, who wins, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spartito.cli import main
from spartito.cli.settings import find

SHOW = "import os; print(os.environ.get('SPARTITO_STRATEGY'), os.environ['WORLD_SIZE'])"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, which is where we are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("SPARTITO_STRATEGY", "SPARTITO_STRATEGY_OPTIONS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "show.py").write_text(SHOW)
    return tmp_path


def run(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """What ``spartito run`` gives: the exit code, what the first worker prints, stderr."""
    code = main(["run", *words])
    out, err = capfd.readouterr()
    return code, out.splitlines()[0].rpartition("] ")[2] if out else "", err


def test_what_is_typed_wins_over_the_environment_and_that_over_a_file(
    project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = project / "spartito.toml"
    file.write_text('[run]\nstrategy = "multi_worker_mirrored"\nworkers = 2\n')
    code, out, err = run(capfd, "show.py")
    assert (code, out) == (0, "multi_worker_mirrored 2")
    first = err.splitlines()[0]
    assert first == f"spartito: {file}: --strategy=multi_worker_mirrored --workers=2"
    monkeypatch.setenv("SPARTITO_STRATEGY", "mirrored")
    code, out, err = run(capfd, "show.py")
    assert (code, out) == (0, "mirrored 2")
    assert err.splitlines()[0] == f"spartito: {file}: --workers=2"
    assert run(capfd, "--strategy", "one_device", "--workers", "1", "show.py") == (
        *(0, "one_device 1", ""),
    )
    monkeypatch.delenv("SPARTITO_STRATEGY")
    assert run(capfd, "--no-config", "--workers", "1", "show.py") == (0, "None 1", "")


def test_a_table_of_pyproject_is_as_good(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (project / "pyproject.toml").write_text("[tool.spartito.run]\nworkers = 2\n")
    assert run(capfd, "show.py")[1] == "None 2"
    (project / "spartito.toml").write_text("[run]\nworkers = 1\n")
    code, _, err = run(capfd, "show.py")
    assert code == 2
    assert "has settings in spartito.toml and in pyproject.toml" in err


def test_where_it_is_looked_for(project: Path) -> None:
    inner = project / "repository" / "deep" / "deeper"
    inner.mkdir(parents=True)
    (project / "spartito.toml").write_text("[run]\n")
    assert find(inner) == (project / "spartito.toml", {"run": {}})
    (project / "repository" / ".git").mkdir()
    assert find(inner) is None  # another's above the repository
    (project / "repository" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert find(inner) is None
    (project / "repository" / "deep" / "spartito.toml").write_text("")
    assert find(inner) == (project / "repository" / "deep" / "spartito.toml", {})


def test_beside_the_script_and_not_where_we_are(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "elsewhere").mkdir()
    (project / "elsewhere" / "show.py").write_text(SHOW)
    (project / "elsewhere" / "spartito.toml").write_text("[run]\nworkers = 2\n")
    assert run(capfd, "elsewhere/show.py")[1] == "None 2"
    assert run(capfd, "--workers=1", "show.py") == (0, "None 1", "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[run]\nworker = 2\n", ["[run] has no option 'worker'", "Did you mean 'workers'?"]),
        ("[rnu]\nworkers = 2\n", ["'rnu' is not a command of spartito", "Did you mean 'run'?"]),
        ("strategy = 'mirrored'\n", ["'strategy' is not a command of spartito"]),
        ("run = 3\n", ["'run' is not a table", "Write [run]"]),
        ("[run]\nyes = 1\n", ["yes = 1 is not true or false", "--yes takes no value"]),
        ("[run]\nworkers = true\n", ["workers = True is not what --workers takes"]),
        ("[run]\nworkers = [1, 2]\n", ["workers = [1, 2] is not what --workers takes"]),
        (
            "[run]\nworkers = 0\n",
            ["--workers 0 is less than 1", "--workers is from", "--no-config"],
        ),
        ("[run]\nworkers = 'two'\n", ["--workers two is not a whole number", "--workers is from"]),
        ("[run]\nstrategy = 'mirored'\n", ["Did you mean 'mirrored'?", "--strategy is from"]),
        ("[run\n", ["spartito.toml: ", "Write it as: [run]"]),
        ("[run]\nno-config = true\n", ["has no option 'no-config'"]),
    ],
)
def test_what_cannot_be_is_refused(
    project: Path, capfd: pytest.CaptureFixture[str], text: str, said: list[str]
) -> None:
    (project / "spartito.toml").write_text(text)
    code, out, err = run(capfd, "show.py")
    assert (code, out) == (2, "")
    assert all(words in err for words in said), err
    assert "Traceback" not in err


def test_a_list_is_an_option_several_times_and_a_nested_command_has_a_nested_table(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "spartito.toml").write_text(
        "[cluster.compose]\nps = 1\n[run]\nworkers = 2\nslow = ['worker:0=0.5', 'worker:1=0.5']\n"
    )
    code, _, err = run(capfd, "show.py")
    assert code == 0
    assert "--slow=worker:0=0.5 --slow=worker:1=0.5" in err
    assert main(["cluster", "compose", "mnist"]) == 0
    out, err = capfd.readouterr()
    assert "ps-0" in out
    assert "--ps=1" in err.splitlines()[0]


@pytest.mark.skipif(os.getuid() != 0, reason="root: only root can give a file to another user")
def test_a_file_of_another_user_is_not_read(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = project / "spartito.toml"
    file.write_text('[run]\nworkers = 2\nssh = "evil"\n')
    os.chown(file, 12345, 12345)
    code, out, err = run(capfd, "--workers=1", "show.py")
    assert (code, out) == (0, "None 1")
    assert f"note: {file} belongs to another user (number 12345), and is not read" in err
