"""The strategy, launcher and resolver of docs/guides/extending.md, installed as packages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import Commands, addresses, commands_in
from tests.launch.installed import install

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "extending.md"
BLOCK = re.compile(r'^```\w+ title="(\S+)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)
SCRIPT = """
import spartito as sp

strategy = sp.strategy()
print("in", strategy.cluster.source, strategy.task, strategy.num_replicas_in_sync, flush=True)
"""

FIT = """
import json, os
import torch
import spartito as sp

strategy = sp.strategy()
net = torch.nn.Linear(5, 3).double()
torch.nn.init.constant_(net.weight, 0.1)
torch.nn.init.constant_(net.bias, 0.2)
if strategy.task.index == int(os.environ.get("WRONG", -1)):  # a processor that computes wrongly
    net.register_forward_hook(lambda module, given, output: output + 1e-15)
x = torch.linspace(-1, 1, 5 * 50).double().reshape(50, 5).sin()
trainer = sp.Trainer(
    net, optimizer=torch.optim.SGD(net.parameters(), 0.5), loss=torch.nn.CrossEntropyLoss(),
    strategy=strategy, deterministic=True,
)
data = sp.data.arrays(x, torch.arange(50) % 3).shuffle().batch(8)
history = trainer.fit(data, epochs=2, verbose=False)
if strategy.is_chief:
    print(json.dumps(history.history["loss"]), flush=True)
"""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Commands]:
    """Commands in a folder with a script, and the page's packages on the path."""
    blocks = dict(BLOCK.findall(PAGE.read_text()))
    target = tmp_path / "packages"
    for name, *modules in (
        ("strategy", "checked_strategy.py", "checked_info.py"),
        ("launcher", "shell_launcher.py"),
        ("resolver", "batch_resolver.py"),
    ):
        package = {module: blocks[module] for module in modules}
        package["pyproject.toml"] = blocks[f"{name}/pyproject.toml"]
        install(tmp_path / name, target, package)
    monkeypatch.setenv("PYTHONPATH", str(target))
    with commands_in(tmp_path) as found:
        found.write("train.py", SCRIPT)
        found.write("fit.py", FIT)
        yield found


def test_a_launcher_that_cannot_be_loaded_leaves_the_others_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "broken-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[spartito.launchers]\nbroken = nowhere:Launcher\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def cluster(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "spartito", "cluster", *words],
            capture_output=True,
            text=True,
            timeout=100,
        )

    assert "services:" in cluster("compose", "mnist", "--workers", "2").stdout
    refused = cluster("broken", "mnist", "--queue", "long")
    assert refused.returncode == 2
    assert "the launcher 'broken' cannot be loaded from nowhere:Launcher: " in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)  # it installs packages
def test_the_packages_of_the_page(commands: Commands) -> None:
    _strategy(commands)
    _launcher(commands)
    _resolver(commands)


def _strategy(commands: Commands) -> None:
    alone = commands.python("fit.py")
    given = ("run", "--strategy", "checked", "--workers", "4", "fit.py")
    ended = commands.spartito(*given)
    assert (alone.code, ended.code) == (0, 0), alone.text + ended.text
    losses, expected = (json.loads(each.out[each.out.rindex("[") :]) for each in (ended, alone))
    assert losses == pytest.approx(expected, rel=1e-12)
    found = []
    for inside, workers in (("checked", "4"), ("mirrored", "2")):  # groups may train so, too
        text = f"local_sgd(groups=2, every=2, inside={inside})"
        ended = commands.spartito("run", "--strategy", text, "--workers", workers, "fit.py")
        assert ended.code == 0, ended.text
        found.append(json.loads(ended.out[ended.out.rindex("[") :]))
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    wrong = commands.spartito(*given, env={"WRONG": "3"})
    assert wrong.code == 2
    assert "processes 2 and 3 disagree on data shard 1" in wrong.err


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
