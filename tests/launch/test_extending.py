"""The launcher and the resolver of docs/extending.md, installed as a package would be."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import Commands, addresses, commands_in
from tests.launch.installed import install

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
BLOCK = re.compile(r'^```\w+ title="(\S+)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)
SCRIPT = """
import spartito as sp

strategy = sp.strategy()
print("in", strategy.cluster.source, strategy.task, strategy.num_replicas_in_sync, flush=True)
"""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Commands]:
    """Commands in a folder with a script, and the page's packages on the path."""
    blocks = dict(BLOCK.findall(PAGE.read_text()))
    target = tmp_path / "packages"
    for name, module in (("launcher", "shell_launcher.py"), ("resolver", "batch_resolver.py")):
        package = {"pyproject.toml": blocks[f"{name}/pyproject.toml"], module: blocks[module]}
        install(tmp_path / name, target, package)
    monkeypatch.setenv("PYTHONPATH", str(target))
    with commands_in(tmp_path) as found:
        found.write("train.py", SCRIPT)
        yield found


def test_the_launcher_and_the_resolver_of_the_page(commands: Commands) -> None:
    _launcher(commands)
    _resolver(commands)


def _launcher(commands: Commands) -> None:
    port = int(addresses(1)[0].rpartition(":")[2])
    words = ("cluster", "shell", "train.py", "--workers", "2", "--port", str(port))
    written = commands.spartito(*words)
    assert written.code == 0, written.text
    path = f"PATH={Path(sys.executable).parent}:$PATH\n"
    script = commands.write("job.sh", path + written.out)
    ended = commands.start("sh", script).end()
    assert ended.code == 0, ended.text
    assert sorted(re.findall("in TF_CONFIG worker (.) 2", ended.out)) == ["0", "1"], ended.text
    refused = commands.spartito(*words, "--strategy", "one_device")
    assert refused.code == 2
    assert "one_device trains in 1 process, but 2 are asked for" in refused.err
    assert "--port N" in commands.spartito("cluster", "shell", "--help").out


def _resolver(commands: Commands) -> None:
    tasks = ",".join(addresses(2))
    both = [
        commands.start(
            sys.executable, "train.py", env={"BATCH_TASKS": tasks, "BATCH_INDEX": str(index)}
        )
        for index in range(2)
    ]
    for index, program in enumerate(both):
        ended = program.end()
        assert ended.code == 0, ended.text
        assert f"in the batch system worker {index} 2" in ended.out
    wrong = commands.python("train.py", env={"BATCH_TASKS": tasks, "BATCH_INDEX": "2"})
    assert wrong.code == 2
    assert "BATCH_INDEX='2' is no index of BATCH_TASKS" in wrong.err
