"""Mistakes of users: exit code 2, one message with the value and the rule, nothing left running."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import spartito as sp
from spartito.cli import main
from spartito.errors import PREFIX
from spartito.recipes import cats_vs_dogs, mnist
from tests.commands import SPARTITO, Commands, Ended, addresses, commands_in, tf_config

SCRIPT = """
import torch
import spartito as sp

strategy = sp.strategy()
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(net.parameters())
torch.manual_seed(0)
x, y = torch.randn(21, 4), torch.arange(21) % 2
trainer = sp.Trainer(net, optimizer=optimizer, loss=torch.nn.BCEWithLogitsLoss(), strategy=strategy)
trainer.fit((x, y), batch_size=6, verbose=0)
print("trained")
"""


@dataclass(frozen=True)
class Case:
    """What is typed, and what the error has to say."""

    words: tuple[str, ...]
    says: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        own = (word for word in self.words if not word.startswith(("/", "-m")))
        return " ".join([*(f"{k}={v}" for k, v in self.env.items()), *own])


def command(words: str, *says: str, env: dict[str, str] | None = None) -> Case:
    """The command ``spartito``."""
    return Case((*SPARTITO, *words.split()), says, env or {})


def plain(*says: str, env: dict[str, str]) -> Case:
    """Plain ``python script.py``."""
    return Case((sys.executable, "script.py"), says, env)


def cluster(addresses: list[str], index: int) -> dict[str, str]:
    return tf_config({"worker": addresses}, "worker", index)


NO_TASK = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1"]}})}
TWO = "run --strategy mirrored --workers 2"

QUICK = [
    # The command line
    command("train mnist --strategy mirored", "'mirored' is not a strategy", "'mirrored'"),
    command("train mnist --precision fp17", "--precision fp17", "'fp16'", "bf16"),
    command("train mnist --epochs 0", "--epochs 0 is less than 1"),
    command("train mnist --epochs many", "--epochs many is not a whole number"),
    command("train mnist --workers 0", "--workers 0 is less than 1"),
    command("run --strategy-options { script.py", "--strategy-options '{' is not JSON"),
    command("run --strategy local_sgd(evry=5) script.py", "no option 'evry'", "mean 'every'"),
    command("run --strategy local_sgd(every=5 script.py", "--strategy: expected , or )"),
    command("run --strategy local_sgd(inside=one_device) script.py", "cannot hold one_device"),
    command('run --strategy-options {"evry":5} script.py', "no option 'evry'"),
    command("compare script.py --strategies mirrored,(", "--strategies: expected the name"),
    command("chaos script.py --strategy mirrored(a=1)", "--strategy: mirrored has no option 'a'"),
    command("cluster slurm script.py --strategy local_sgd(evry=5)", "no option 'evry'"),
    command(
        "run script.py", "SPARTITO_STRATEGY: 'x' is not a strategy", env={"SPARTITO_STRATEGY": "x"}
    ),
    command("run --nnodes 2 script.py", "--nnodes 2", "--master-addr"),
    command("run --nnodes 2 --node-rank 2 --master-addr a:1 script.py", "--node-rank 2", "0 to 1"),
    command("run --hosts a,b --nnodes 2 script.py", "--hosts and --nnodes exclude each other"),
    command(
        "run --hosts a --master-addr a:1 --slow worker:0=0.5 script.py", "--master-addr --slow"
    ),
    command("run --port 1 --env A script.py", "--port --env without --hosts"),
    command("train mnist --mesh data=1,modell", "'modell' is no axis", "data=2,model=2"),
    command("train mnist --mesh data=1,model=3 --workers 2", "a mesh of 3 tasks in a job of 2"),
    command(
        'train mnist --mesh model=2 --strategy-options {"mesh":{"model":4}}', "Say once what mesh"
    ),
    command("train mnist --stages 0", "--stages 0 is less than 1"),
    command("train mnist --stages 2 --strategy sharded", "--stages 2 under --strategy sharded"),
    command("train mnist --stages 3 --workers 2", "Take a multiple of 3 tasks, or stages=2"),
    command("predict nowhere x.png", "nowhere is no run folder"),
    # Who is in the job
    command("run script.py", "TF_CONFIG: '{' is not JSON", env={"TF_CONFIG": "{"}),
    command("run script.py", "has no 'task'", env=NO_TASK),
    command("run script.py", "index 2 is out of range", "0 to 1", env=cluster(["a:1", "b:1"], 2)),
    command("run script.py", "worker 0 and worker 1", "a:1", env=cluster(["a:1", "a:1"], 0)),
    command("run script.py", "localhost:1", "b:1", env=cluster(["localhost:1", "b:1"], 0)),
]
"""Mistakes that a command finds before it starts anything: typed in this process."""

COLD = [
    command("train mnits", "'mnits' is not a recipe", "Did you mean 'mnist'?"),
    command("run no_such.py", "there is no script 'no_such.py'"),
    plain("TF_CONFIG: '{' is not JSON", "It looks like", env={"TF_CONFIG": "{"}),
]
WHOLE = [
    command(
        'run --mesh model=2 --strategy-options {"layout":{"hiden":"model"}} script.py',
        "no tensor of the model has a dim 'hiden'",
        "The model has hidden (2 tensors), features",
    ),
    # While two replicas train: both find it, or one alone
    command(f"{TWO} script.py", "does not fit an output of (3, 2)", "target of (3,)"),
    command("train mnist --out file/run --workers 2", "file/run cannot be written"),
]
"""One for each command that starts tasks, and what only training finds: in processes of their own.

The quick tests have the latter in this process: in test_trainer.py, and below.
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with commands_in(tmp_path_factory.mktemp("mistakes")) as found:
        found.write("script.py", SCRIPT)
        found.write("file", "")
        yield found


def check(ended: Ended, says: Sequence[str]) -> None:
    """One message of ours, with these words in it, and nothing else that went wrong."""
    assert ended.code == 2, ended.text
    assert ended.err.count(PREFIX) == 1
    message = ended.err.partition(PREFIX)[2]
    assert all(words in message for words in says), message
    assert "Traceback" not in ended.text
    assert "trained" not in ended.out


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_a_mistake_on_the_command_line(
    case: Case,
    commands: Commands,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(commands.directory)
    for name, value in case.env.items():
        monkeypatch.setenv(name, value)
    code = main(case.words[len(SPARTITO) :])
    check(Ended(code, *capsys.readouterr()), case.says)


@pytest.mark.parametrize(
    "case", [*COLD, *(pytest.param(case, marks=pytest.mark.slow) for case in WHOLE)], ids=str
)
def test_a_mistake_in_processes_of_its_own(case: Case, commands: Commands) -> None:
    check(commands.start(*case.words, env=case.env, forks=True).end(), case.says)


@pytest.mark.parametrize(
    ("recipe", "words", "says"),
    [
        (cats_vs_dogs.main, "", "cats_vs_dogs needs photos, and --data names none"),
        (cats_vs_dogs.main, "--data one", "'one' has only one class, 'cat'; at least 2 are needed"),
        (mnist.main, "--data nowhere", "'nowhere' does not exist"),
        (mnist.main, "--resume --out fresh", "--resume: fresh holds no checkpoint"),
    ],
)
def test_a_recipe_that_cannot_begin(
    recipe: Callable[[], None],
    words: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "one" / "cat").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(tmp_path / "one" / "cat" / "1.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["recipe", *words.split()])
    with pytest.raises(sp.UserError) as caught:
        recipe()
    assert says in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize("way", [pytest.param("plain", marks=pytest.mark.slow), "run"])
def test_a_port_in_use(way: str, commands: Commands) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        if way == "plain":
            env = tf_config({"worker": [taken, *addresses(1)]}, "worker", 0)
            ended = commands.python("script.py", env=env, forks=True)
        else:
            words = ["run", "--nnodes", "2", "--master-addr", taken, "script.py"]
            ended = commands.spartito(*words)
    check(ended, [taken, "Address already in use", "choose a free one"])


@pytest.mark.slow
def test_someone_else_at_the_rendezvous(commands: Commands) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        env = tf_config({"worker": [taken, *addresses(1)]}, "worker", 1)
        env["SPARTITO_TIMEOUT"] = "1"
        ended = commands.python("script.py", env=env, forks=True)
    assert ended.code == 69
    assert f"worker 0 ({taken}) did not reply within 1 s" in ended.err
    assert "Traceback" not in ended.err


OPTIONS = {
    "{": "SPARTITO_STRATEGY_OPTIONS '{' is not JSON",
    "[1]": "SPARTITO_STRATEGY_OPTIONS '[1]' is not a JSON object",
    '{"timeuot": 1}': (
        "one_device has no option 'timeuot'\n"
        "  one_device(timeuot=1)\n"
        "             ^\n"
        "  Did you mean 'timeout'?"
    ),
    '{"timeout": "long"}': "timeout='long' is not a number of seconds above 0",
    '{"communication": "radio"}': "unknown communication 'radio'",
    '{"device": "gpu"}': "device='gpu' is none of torch's",
}


@pytest.mark.parametrize("text", OPTIONS)
def test_strategy_options_that_cannot_be(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARTITO_STRATEGY_OPTIONS", text)
    with pytest.raises(sp.UserError) as caught:
        sp.strategy()
    assert OPTIONS[text] in str(caught.value)


def test_a_strategy_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARTITO_STRATEGY", "mirored")
    with pytest.raises(sp.UserError, match=r"'mirored'.*\n.*Did you mean 'mirrored'\?"):
        sp.strategy()


def test_a_time_limit_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARTITO_TIMEOUT", "abc")
    with pytest.raises(sp.UserError, match=r"SPARTITO_TIMEOUT='abc' is not a number of seconds"):
        sp.OneDeviceStrategy()


def constant(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.eq(output.argmax(1), target).float().mean()


TRAINERS: list[tuple[dict[str, Any], str]] = [
    ({"metrics": ["acuracy"]}, "unknown metric 'acuracy'\n  Did you mean 'accuracy'?"),
    ({"precision": "fp17"}, "unknown precision 'fp17'\n  Did you mean 'fp16'? Known: 16-mixed, "),
    ({"loss": "crossentropy"}, "loss='crossentropy' is not a function"),
    ({"loss": constant}, "the loss has no gradient"),
    ({"optimizer": "adam"}, "optimizer='adam' is no optimizer"),
]


@pytest.mark.parametrize(("options", "says"), TRAINERS, ids=lambda part: str(part)[:30])
def test_a_trainer_that_cannot_be(options: dict[str, Any], says: str) -> None:
    net = torch.nn.Linear(4, 2)
    good = {"optimizer": torch.optim.SGD(net.parameters()), "loss": torch.nn.CrossEntropyLoss()}
    with pytest.raises(sp.UserError) as caught:
        sp.Trainer(net, **{**good, **options}, strategy=sp.OneDeviceStrategy()).fit(
            (torch.randn(6, 4), torch.arange(6) % 2), verbose=0
        )
    assert says in str(caught.value)


def test_a_run_folder_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPARTITO_RUN_DIR", str(tmp_path / "file" / "run"))
    net = torch.nn.Linear(4, 2)
    with pytest.raises(sp.UserError, match=r"file/run cannot be written"):
        sp.Trainer(
            net,
            optimizer=torch.optim.SGD(net.parameters()),
            loss=torch.nn.CrossEntropyLoss(),
            strategy=sp.OneDeviceStrategy(),
        ).fit((torch.randn(6, 4), torch.arange(6) % 2), verbose=0)


def test_a_callback_that_is_none() -> None:
    net = torch.nn.Linear(4, 2)
    trainer = sp.Trainer(
        net, optimizer=torch.optim.SGD(net.parameters()), strategy=sp.OneDeviceStrategy()
    )
    with pytest.raises(sp.UserError, match="'early stopping' is no callback"):
        trainer.fit(torch.randn(6, 4), callbacks=["early stopping"])  # type: ignore[list-item]
