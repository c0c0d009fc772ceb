"""Mistakes of users: exit code 2, one message with the value and the rule, nothing left running."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from PIL import Image

import spartito as sp
from spartito.errors import PREFIX
from tests.commands import SPARTITO, Commands, Ended, addresses, commands_in, tf_config

AT_ONCE = 2
"""Cases that run side by side: most of their time is the import of torch."""

SCRIPT = """
import sys
import torch
import spartito as sp

case = sys.argv[1] if len(sys.argv) > 1 else ""
strategy = sp.strategy()
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(net.parameters())
x, y = torch.randn(21, 4), torch.arange(21) % 2
loss, batch_size = torch.nn.CrossEntropyLoss(), 6
if case == "output":
    loss = torch.nn.BCEWithLogitsLoss()
elif case == "state":
    loss(net(x), y).backward()
    optimizer.step()
elif case == "batch":
    batch_size = 1
trainer = sp.Trainer(net, optimizer=optimizer, loss=loss, strategy=strategy)
trainer.fit((x, y), batch_size=batch_size, verbose=0)
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


def plain(words: str, *says: str, env: dict[str, str] | None = None) -> Case:
    """Plain ``python script.py``."""
    return Case((sys.executable, "script.py", *words.split()), says, env or {})


def cluster(addresses: list[str], index: int) -> dict[str, str]:
    return tf_config({"worker": addresses}, "worker", index)


NO_TASK = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1"]}})}
TWO = "run --strategy mirrored --workers 2"

CASES = [
    # The command line
    command("train mnits", "'mnits' is not a recipe", "Did you mean 'mnist'?"),
    command("train mnist --strategy mirored", "'mirored' is not a strategy", "'mirrored'"),
    command("train mnist --precision fp17", "--precision fp17", "'fp32'", "bf16"),
    command("train mnist --epochs 0", "--epochs 0 is less than 1"),
    command("train mnist --epochs many", "--epochs many is not a whole number"),
    command("train mnist --workers 0", "--workers 0 is less than 1"),
    command("run no_such.py", "there is no script 'no_such.py'"),
    command("run --strategy-options { script.py", "--strategy-options '{' is not JSON"),
    command("run --nnodes 2 script.py", "--nnodes 2", "--master-addr"),
    command("run --nnodes 2 --node-rank 2 --master-addr a:1 script.py", "--node-rank 2", "0 to 1"),
    command("predict nowhere x.png", "nowhere is no run folder"),
    # Recipes
    command("train cats_vs_dogs", "cats_vs_dogs needs photos", "--data"),
    command("train cats_vs_dogs --data one --workers 2", "only one class, 'cat'", "at least 2"),
    command("train mnist --data nowhere", "'nowhere' does not exist"),
    command("train mnist --resume --out fresh", "--resume: fresh holds no checkpoint"),
    command("train mnist --out file/run --workers 2", "file/run cannot be written"),
    # Who is in the job
    command("run script.py", "TF_CONFIG: '{' is not JSON", env={"TF_CONFIG": "{"}),
    plain("", "TF_CONFIG: '{' is not JSON", "It looks like", env={"TF_CONFIG": "{"}),
    command("run script.py", "has no 'task'", env=NO_TASK),
    command("run script.py", "index 2 is out of range", "0 to 1", env=cluster(["a:1", "b:1"], 2)),
    command("run script.py", "worker 0 and worker 1", "a:1", env=cluster(["a:1", "a:1"], 0)),
    command("run script.py", "localhost:1", "b:1", env=cluster(["localhost:1", "b:1"], 0)),
    # The environment
    plain("", "'mirored'", "Did you mean 'mirrored'?", env={"SPARTITO_STRATEGY": "mirored"}),
    command(f"{TWO} script.py", "SPARTITO_TIMEOUT='abc'", env={"SPARTITO_TIMEOUT": "abc"}),
    plain("", "file/run cannot be written", env={"SPARTITO_RUN_DIR": "file/run"}),
    # The trainer
    plain("output", "BCEWithLogitsLoss does not fit an output of (6, 2)", "target of (6,)"),
    command(f"{TWO} script.py output", "does not fit an output of (3, 2)", "target of (3,)"),
    command(f"{TWO} script.py state", "Adam with state of 2 parameters for 2 replicas", "fresh"),
    command(f"{TWO} script.py batch", "a global batch of 1 for 2 replicas", "at least one"),
]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with commands_in(tmp_path_factory.mktemp("mistakes")) as found:
        found.write("script.py", SCRIPT)
        found.write("file", "")
        for folder in ("empty", "one/cat"):
            (found.directory / folder).mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(found.directory / "one" / "cat" / "1.png")
        yield found


@pytest.fixture(scope="module")
def endings(commands: Commands) -> list[Ended]:
    """How every case ended; `Program.end` sees that nothing of it is left."""

    def run(case: Case) -> Ended:
        return commands.start(*case.words, env=case.env).end()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(run, CASES))


def check(ended: Ended, says: Sequence[str]) -> None:
    """One message of ours, with these words in it, and nothing else that went wrong."""
    assert ended.code == 2, ended.text
    assert ended.err.count(PREFIX) == 1
    message = ended.err.partition(PREFIX)[2]
    assert all(words in message for words in says), message
    assert "Traceback" not in ended.text
    assert "trained" not in ended.out


@pytest.mark.timeout(240)  # the first one waits for all of them
@pytest.mark.parametrize("place", range(len(CASES)), ids=lambda place: str(CASES[place]))
def test_a_mistake_is_told(place: int, endings: list[Ended]) -> None:
    check(endings[place], CASES[place].says)


@pytest.mark.parametrize("way", ["plain", "run"])
def test_a_port_in_use(way: str, commands: Commands) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        if way == "plain":
            env = tf_config({"worker": [taken, *addresses(1)]}, "worker", 0)
            ended = commands.python("script.py", env=env)
        else:
            words = ["run", "--nnodes", "2", "--master-addr", taken, "script.py"]
            ended = commands.spartito(*words)
    check(ended, [taken, "Address already in use", "choose a free one"])


def test_someone_else_at_the_meeting_place(commands: Commands) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        env = tf_config({"worker": [taken, *addresses(1)]}, "worker", 1)
        ended = commands.python("script.py", env=env | {"SPARTITO_TIMEOUT": "1"})
    assert ended.code == 69
    assert f"worker 0 ({taken}) did not answer within 1 s" in ended.err
    assert "Traceback" not in ended.err


def test_nothing_was_made_where_nothing_ran(commands: Commands, endings: list[Ended]) -> None:
    assert endings
    assert not (commands.directory / "fresh").exists()


OPTIONS = {
    "{": "='{' is no JSON",
    "[1]": "='[1]' is no JSON object",
    '{"timeuot": 1}': "one_device has no option 'timeuot'\n  Did you mean 'timeout'?",
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


def test_a_time_limit_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARTITO_TIMEOUT", "abc")
    with pytest.raises(sp.UserError, match=r"SPARTITO_TIMEOUT='abc' is not a number of seconds"):
        sp.OneDeviceStrategy()


def constant(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.eq(output.argmax(1), target).float().mean()


TRAINERS: list[tuple[dict[str, Any], str]] = [
    ({"metrics": ["acuracy"]}, "unknown metric 'acuracy'\n  Did you mean 'accuracy'?"),
    ({"precision": "fp17"}, "unknown precision 'fp17'\n  Did you mean 'fp32'? Known: bf16, fp32."),
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


def test_a_callback_that_is_none() -> None:
    net = torch.nn.Linear(4, 2)
    trainer = sp.Trainer(
        net, optimizer=torch.optim.SGD(net.parameters()), strategy=sp.OneDeviceStrategy()
    )
    with pytest.raises(sp.UserError, match="'early stopping' is no callback"):
        trainer.fit(torch.randn(6, 4), callbacks=["early stopping"])  # type: ignore[list-item]
