"""Mistakes of users: exit code 2, one message with the value and the rule, nothing left running."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from PIL import Image

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
loss, options, batch_size, callbacks = torch.nn.CrossEntropyLoss(), {}, 6, []
if case == "output":
    loss = torch.nn.BCEWithLogitsLoss()
elif case == "loss":
    loss = "crossentropy"
elif case == "constant":
    loss = lambda output, target: (output.argmax(1) == target).float().mean()
elif case == "state":
    loss(net(x), y).backward()
    optimizer.step()
elif case == "optimizer":
    optimizer = "adam"
elif case == "metric":
    options["metrics"] = ["acuracy"]
elif case == "precision":
    options["precision"] = "fp17"
elif case == "callback":
    callbacks = ["early stopping"]
elif case == "batch":
    batch_size = 1
trainer = sp.Trainer(net, optimizer=optimizer, loss=loss, strategy=strategy, **options)
trainer.fit((x, y), batch_size=batch_size, callbacks=callbacks, verbose=0)
print("trained")
"""


@dataclass(frozen=True)
class Case:
    """What is typed, and what the error has to say."""

    words: tuple[str, ...]
    says: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        own = (word for word in self.words if not word.startswith("/"))
        return " ".join([*(f"{k}={v}" for k, v in self.env.items() if len(v) < 40), *own])


def command(words: str, *says: str, env: dict[str, str] | None = None) -> Case:
    """The command ``spartito``."""
    return Case((*SPARTITO, *words.split()), says, env or {})


def plain(words: str, *says: str, env: dict[str, str] | None = None) -> Case:
    """Plain ``python script.py``."""
    return Case((sys.executable, "script.py", *words.split()), says, env or {})


def cluster(addresses: list[str], index: int) -> dict[str, str]:
    return tf_config({"worker": addresses}, "worker", index)


NO_TASK = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1"]}})}
OPTIONS = "SPARTITO_STRATEGY_OPTIONS"
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
    command("train cats_vs_dogs --data nowhere", "'nowhere' does not exist"),
    command("train cats_vs_dogs --data empty", "'empty' has no folders of classes"),
    command("train cats_vs_dogs --data one --workers 2", "only one class, 'cat'", "at least 2"),
    command("train cats_vs_dogs --data hollow", "class folder 'dog'", "has no image"),
    command("train mnist --data nowhere", "'nowhere' does not exist"),
    command("train mnist --data empty", "'empty' has no file train-images-idx3-ubyte"),
    command("train mnist --resume --out fresh", "--resume: fresh holds no checkpoint"),
    command("train mnist --out file/run", "file/run cannot be written: Not a directory"),
    command("train mnist --out file/run --workers 2", "file/run cannot be written"),
    # Who is in the job
    command("run script.py", "TF_CONFIG: '{' is not JSON", env={"TF_CONFIG": "{"}),
    plain("", "TF_CONFIG: '{' is not JSON", "It looks like", env={"TF_CONFIG": "{"}),
    command("run script.py", "has no 'task'", env=NO_TASK),
    command("run script.py", "index 2 is out of range", "0 to 1", env=cluster(["a:1", "b:1"], 2)),
    command("run script.py", "worker 0 and worker 1", "a:1", env=cluster(["a:1", "a:1"], 0)),
    command("run script.py", "localhost:1", "b:1", env=cluster(["localhost:1", "b:1"], 0)),
    plain("", "localhost:1", "the machine itself", env=cluster(["localhost:1", "b:1"], 1)),
    # The environment
    plain("", "'mirored'", "Did you mean 'mirrored'?", env={"SPARTITO_STRATEGY": "mirored"}),
    plain("", f"{OPTIONS}='{{' is no JSON", env={OPTIONS: "{"}),
    plain("", f"{OPTIONS}='[1]' is no JSON object", env={OPTIONS: "[1]"}),
    plain("", "no option 'timeuot'", "Did you mean 'timeout'?", env={OPTIONS: '{"timeuot": 1}'}),
    plain("", "timeout='long'", "seconds above 0", env={OPTIONS: '{"timeout": "long"}'}),
    plain("", "SPARTITO_TIMEOUT='abc'", "seconds above 0", env={"SPARTITO_TIMEOUT": "abc"}),
    command(f"{TWO} script.py", "SPARTITO_TIMEOUT='abc'", env={"SPARTITO_TIMEOUT": "abc"}),
    plain("", "file/run cannot be written", env={"SPARTITO_RUN_DIR": "file/run"}),
    # The trainer
    plain("metric", "unknown metric 'acuracy'", "Did you mean 'accuracy'?"),
    plain("precision", "unknown precision 'fp17'", "bf16, fp32"),
    plain("loss", "loss='crossentropy' is not a function"),
    plain("optimizer", "optimizer='adam' is no optimizer"),
    plain("callback", "'early stopping' is no callback"),
    plain("constant", "the loss has no gradient"),
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
        for folder in ("empty", "one/cat", "hollow/cat", "hollow/dog"):
            (found.directory / folder).mkdir(parents=True)
        for folder in ("one", "hollow"):
            Image.new("RGB", (9, 9)).save(found.directory / folder / "cat" / "1.png")
        yield found


@pytest.fixture(scope="module")
def endings(commands: Commands) -> dict[str, Ended]:
    """How every case ended; `Program.end` sees that nothing of it is left."""

    def run(case: Case) -> Ended:
        return commands.start(*case.words, env=case.env).end()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(map(str, CASES), pool.map(run, CASES), strict=True))


def check(ended: Ended, says: Sequence[str]) -> None:
    """One message of ours, with these words in it, and nothing else that went wrong."""
    assert ended.code == 2, ended.text
    assert ended.err.count(PREFIX) == 1
    message = ended.err.partition(PREFIX)[2]
    assert all(words in message for words in says), message
    assert "Traceback" not in ended.text
    assert "trained" not in ended.out


@pytest.mark.timeout(240)  # the first one waits for all of them
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_mistake_is_told(case: Case, endings: dict[str, Ended]) -> None:
    check(endings[str(case)], case.says)


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


def test_nothing_was_made_where_nothing_ran(commands: Commands, endings: dict[str, Ended]) -> None:
    assert endings
    assert not (commands.directory / "fresh").exists()
