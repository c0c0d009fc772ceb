"""Whole jobs as a user starts them: recipes, own scripts, every way to launch, every failure."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from spartito.checkpoint.manager import CheckpointManager
from spartito.data import digits
from spartito.errors import PREFIX, UserError
from spartito.recipes.predict import main as predict
from tests.commands import (
    SPARTITO,
    TORCHRUN,
    Commands,
    Ended,
    addresses,
    commands_in,
    tf_config,
)

EXAMPLES = Path(__file__).parent.parent / "examples"
EXACT = 1e-12
FIGURES = {
    "epoch", "step", "loss", "accuracy", "val_loss", "val_accuracy", "seconds",
    "examples_per_second", "data_wait_fraction",
}  # fmt: skip

OWN_SCRIPT = """
import json, sys
from contextlib import suppress
from pathlib import Path
import numpy as np
import torch
import spartito as sp

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(5, 16, bias=False)
        self.norm = torch.nn.BatchNorm1d(16)
        self.drop = torch.nn.Dropout(0.3)
        self.last = torch.nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x)).relu()))

strategy = sp.strategy()
with strategy.scope():
    torch.manual_seed(0)
    net = Net().double()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

draw = np.random.default_rng(0)
x, y = draw.normal(size=(103, 5)), draw.integers(0, 3, 103)  # float64, and 103 = 10 * 10 + 3
train = sp.data.arrays(x, y).shuffle().batch(10)
trainer = sp.Trainer(net, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss(),
                     metrics=["accuracy"], strategy=strategy, deterministic=True)
first = trainer.fit(train, epochs=2, validation_data=(x[:7], y[:7]))
steps = trainer.step
second = trainer.fit(train, epochs=1)
found = {
    "history": [first.history, second.history],
    "steps": [steps, trainer.step],
    "predictions": trainer.predict(x).tolist(),
    "chief": strategy.is_chief,
    "replicas": strategy.num_replicas_in_sync,
    "task": [strategy.task.type, strategy.task.index],
    "strategy": strategy.name,
}
strategy.close()
# A thread of gloo that lives on may abort the process while the interpreter ends.
found["threads"] = []
for path in Path("/proc/self/task").glob("*/comm"):
    with suppress(OSError):  # one ends just now
        found["threads"].append(path.read_text().strip())
Path(sys.argv[1], f"{strategy.task}.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with commands_in(tmp_path_factory.mktemp("jobs")) as found:
        found.write("own.py", OWN_SCRIPT)
        yield found


def result(ended: Ended) -> dict[str, Any]:
    """The last line of a job with ``--json``."""
    assert ended.code == 0, ended.text
    found: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# The recipes


@pytest.fixture(scope="module")
def trained(commands: Commands) -> dict[str, Any]:
    words = ["train", "mnist", "--strategy", "mirrored", "--workers", "2", "--epochs", "1"]
    return result(commands.spartito(*words, "--json", "--out", "digits"))


def test_two_workers_learn_the_digits(trained: dict[str, Any], commands: Commands) -> None:
    assert trained["val_accuracy"] > 0.85
    assert (trained["epochs"], trained["steps"]) == (1, 125)
    assert all((commands.directory / trained[name]).is_file() for name in ("model", "report"))


def test_the_run_folder_is_complete(trained: dict[str, Any], commands: Commands) -> None:
    folder = commands.directory / "digits"
    config = json.loads((folder / "config.json").read_text())
    assert (config["strategy"], config["cluster"]["replicas"]) == ("mirrored", 2)
    assert config["model"]["trainable"] == 269_322
    (epoch,) = lines(folder / "history.jsonl")
    assert set(epoch) == FIGURES
    assert (epoch["epoch"], epoch["step"]) == (1, 125)
    assert epoch["val_accuracy"] == trained["val_accuracy"]
    assert CheckpointManager(folder / "checkpoints").latest() is not None
    assert list((folder / "logs").rglob("events.out.tfevents.*"))


def test_the_report_needs_nothing_else(trained: dict[str, Any], commands: Commands) -> None:
    page = (commands.directory / trained["report"]).read_text()
    assert "val_accuracy" in page or "validation" in page
    assert not re.search(r"""(src|href)=["']?(https?:|//|[\w./]+\.(js|css|png|svg))""", page)


def test_the_trained_run_names_digits(
    trained: dict[str, Any], commands: Commands, tmp_path: Path
) -> None:
    source = digits("validation").source
    given = []
    for index in range(4):
        image, label = source[index]  # type: ignore[index]
        path = tmp_path / f"{index}.png"
        Image.fromarray((image.numpy() * 255).astype("uint8")).save(path)
        given.append((str(path), str(int(label))))
    broken = tmp_path / "broken.png"
    broken.write_text("no picture")
    paths = [path for path, _ in given]
    ended = commands.spartito("predict", "digits", paths[0], broken, *paths[1:], "--json")
    assert ended.code == 2
    assert ended.err.startswith(PREFIX)
    assert str(broken) in ended.err
    results = [json.loads(line) for line in ended.out.splitlines()]
    assert all(set(each) == {"path", "label", "score"} for each in results)
    assert [each["path"] for each in results] == paths
    assert all(0 < each["score"] <= 1 for each in results)
    right = [each["label"] == label for each, (_, label) in zip(results, given, strict=True)]
    assert sum(right) >= 3


@pytest.mark.slow
def test_a_small_gpt_writes_on(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    text = commands.write("text.txt", "abcdefghij\n" * 400)
    words: list[str | Path] = ["train", "gpt", "--strategy", "mirrored", "--workers", "2"]
    found = result(commands.spartito(*words, "--data", text, "--json", "--out", "letters"))
    assert found["val_perplexity"] < 11
    words = ["predict", "letters", "--prompt", "abc", "--length", "70", "--temperature", "9"]
    written = json.loads(commands.spartito(*words, "--seed", "1", "--json").out)
    assert written.pop("text").startswith("abc")
    assert written == {"prompt": "abc", "length": 70, "temperature": 9.0, "seed": 1}
    ended = commands.spartito("predict", "letters", "--temperature", "-1")
    assert (ended.code, "--temperature -1 is not a number, 0 or more" in ended.err) == (2, True)

    def texts(**writing: Any) -> str:
        assert predict(commands.directory / "letters", [], {"length": 70, **writing}) == 0
        return capsys.readouterr().out

    cold, warm, again, other = (
        texts(prompt="b", temperature=heat, seed=seed)
        for heat, seed in ((0, 0), (9, 0), (9, 0), (9, 1))
    )
    assert all(len(each) == 72 and each.startswith("b") for each in (cold, warm, again, other))
    assert (len({cold, warm, other}), warm == again) == (3, True)
    with pytest.raises(UserError, match=r"which writes, and looks at no own\.py"):
        predict(commands.directory / "letters", [Path("own.py")], {})
    with pytest.raises(UserError, match="'é' does not occur in the text that was learned"):
        predict(commands.directory / "letters", [], {"prompt": "abé"})


def test_a_model_that_looks_at_files_writes_nothing(
    trained: dict[str, Any], commands: Commands
) -> None:
    folder = commands.directory / "digits"
    with pytest.raises(UserError, match="looks at files and takes no --prompt"):
        predict(folder, [Path("1.png")], {"prompt": "a"})
    with pytest.raises(UserError, match=r"looks at files\n.*Name one or more"):
        predict(folder, [], {})


@pytest.mark.slow
def test_a_run_goes_on(trained: dict[str, Any], commands: Commands) -> None:
    folder = commands.directory / "longer"
    shutil.copytree(commands.directory / "digits", folder)
    words: list[str | Path] = ["train", "mnist", "--workers", "2", "--out", folder, "--json"]
    found = result(commands.spartito(*words, "--resume", "--epochs", "2"))
    assert (found["epochs"], found["steps"]) == (2, 2 * trained["steps"])
    assert [line["epoch"] for line in lines(folder / "history.jsonl")] == [1, 2]
    assert found["loss"] < trained["loss"]


@pytest.mark.slow
def test_photos_of_cats_and_dogs(commands: Commands) -> None:
    photos = commands.directory / "photos"
    for number, kind in enumerate(("cat", "dog")):
        (photos / kind).mkdir(parents=True)
        for index in range(6):
            size = (40 + 9 * index, 60)
            color = (200 * number, 30 * index, 100)
            Image.new("RGB", size, color).save(photos / kind / f"{index}.jpg")
    # `image_folder` decides by the seed which photos train: of 12, two validate.
    for kind in ("cat", "dog"):
        (photos / kind / "0.jpg").write_bytes((photos / kind / "0.jpg").read_bytes()[:200])
    words: list[str | Path] = ["train", "cats_vs_dogs", "--data", photos, "--epochs", "1"]
    words += ["--batch-size", "4"]
    ended = commands.spartito(*words, "--json", "--out", "pets")
    found = result(ended)
    assert {"loss", "accuracy", "val_loss", "val_accuracy"} <= set(found)
    assert str(photos / "cat" / "0.jpg") in ended.err
    assert "skip" in ended.err
    good = photos / "dog" / "5.jpg"
    (prediction,) = [
        json.loads(line)
        for line in commands.spartito("predict", "pets", good, "--json").out.splitlines()
    ]
    assert prediction["path"] == str(good)
    assert prediction["label"] in ("cat", "dog")
    assert 0.5 <= prediction["score"] <= 1


# A user's own script, under every way to start it


def by_hand(commands: Commands, kinds: list[tuple[str, int]], out: str) -> list[Ended]:
    """Plain ``python`` in as many shells as there are tasks, with ``TF_CONFIG``."""
    hosts = addresses(len(kinds))
    cluster: dict[str, list[str]] = {}
    for (kind, _), host in zip(kinds, hosts, strict=True):
        cluster.setdefault(kind, []).append(host)
    started = [
        commands.start(
            sys.executable, "own.py", out, env=tf_config(cluster, kind, index), forks=True
        )
        for kind, index in kinds
    ]
    return [program.end() for program in started]


def worker_list(commands: Commands, out: str) -> list[Ended]:
    return by_hand(commands, [("worker", 0), ("worker", 1)], out)


def chief_and_worker(commands: Commands, out: str) -> list[Ended]:
    return by_hand(commands, [("chief", 0), ("worker", 0)], out)


def torchrun(commands: Commands, out: str) -> list[Ended]:
    return [commands.start(*TORCHRUN, "--nproc-per-node", "2", "own.py", out).end()]


def two_nodes(commands: Commands, out: str) -> list[Ended]:
    (host,) = addresses(1)
    words = ["run", "--nnodes", "2", "--master-addr", host]
    started = [
        commands.start(*SPARTITO, *words, "--node-rank", str(rank), "own.py", out)
        for rank in range(2)
    ]
    return [program.end() for program in started]


def by_environment(commands: Commands, out: str) -> list[Ended]:
    """The strategy and its options come from the environment, not from the command."""
    env = {
        "SPARTITO_STRATEGY": "mirrored",
        "SPARTITO_STRATEGY_OPTIONS": '{"communication": "process_group"}',
        "SPARTITO_RUN_DIR": f"{out}/run",
    }
    return [commands.spartito("run", "--workers", "2", "own.py", out, env=env)]


Launch = Callable[[Commands, str], list[Ended]]
WORKERS = [["worker", 0], ["worker", 1]]
LAUNCHES: list[tuple[Launch, list[list[Any]], str]] = [
    (worker_list, WORKERS, "multi_worker_mirrored"),
    (chief_and_worker, [["chief", 0], ["worker", 0]], "multi_worker_mirrored"),
    (torchrun, WORKERS, "multi_worker_mirrored"),
    (two_nodes, WORKERS, "multi_worker_mirrored"),
    (by_environment, WORKERS, "mirrored"),
]


@pytest.fixture(scope="module")
def alone(commands: Commands) -> dict[str, Any]:
    """The own script on one device."""
    (commands.directory / "alone").mkdir()
    ended = commands.python("own.py", "alone", forks=True)
    assert ended.code == 0, ended.text
    found: dict[str, Any] = json.loads((commands.directory / "alone/worker 0.json").read_text())
    return found


def test_an_own_script_on_one_device(alone: dict[str, Any]) -> None:
    assert (alone["chief"], alone["replicas"], alone["task"]) == (True, 1, ["worker", 0])
    assert alone["strategy"] == "one_device"
    assert alone["steps"] == [22, 33]
    first, second = alone["history"]
    assert {name: len(values) for name, values in first.items()} == {
        "loss": 2, "accuracy": 2, "val_loss": 2, "val_accuracy": 2,
    }  # fmt: skip
    assert set(second) == {"loss", "accuracy"}
    assert second["loss"][0] < first["loss"][0]
    assert len(alone["predictions"]) == 103


@pytest.mark.parametrize(
    ("launch", "tasks", "strategy"),
    [
        pytest.param(*case, id=case[0].__name__, marks=pytest.mark.slow if slow else ())
        for slow, case in zip((True, True, False, False, True), LAUNCHES, strict=True)
    ],
)
@pytest.mark.slow
@pytest.mark.usefixtures("no_segments_left")
def test_two_processes_give_the_numbers_of_one(
    launch: Launch, tasks: list[Any], strategy: str, commands: Commands, alone: dict[str, Any]
) -> None:
    out = commands.directory / launch.__name__
    out.mkdir()
    ended = launch(commands, launch.__name__)
    assert [e.code for e in ended] == [0] * len(ended), [e.text for e in ended]
    found = [json.loads((out / f"{kind} {index}.json").read_text()) for kind, index in tasks]
    assert [one["task"] for one in found] == tasks
    assert [one["chief"] for one in found] == [True, False]
    assert [(one["replicas"], one["strategy"]) for one in found] == [(2, strategy)] * 2
    assert not any("gloo" in thread for one in found for thread in one["threads"])
    assert found[0]["history"] == found[1]["history"]
    assert found[0]["steps"] == alone["steps"]
    for here, there in zip(found[0]["history"], alone["history"], strict=True):
        assert here.keys() == there.keys()
        for name in here:
            assert here[name] == pytest.approx(there[name], rel=0, abs=EXACT)
    for one in found:
        for row, wanted in zip(one["predictions"], alone["predictions"], strict=True):
            assert row == pytest.approx(wanted, rel=0, abs=1e-10)
    if launch is by_environment:
        assert len(lines(out / "run" / "history.jsonl")) == 1 + 2  # `fit` was called twice


@pytest.mark.slow
def test_the_first_example(commands: Commands) -> None:
    ended = commands.spartito(
        "run", "--strategy", "mirrored", "--workers", "2", EXAMPLES / "first.py"
    )
    assert ended.code == 0, ended.text
    found = re.search(r"validation accuracy ([\d.]+)%", ended.out)
    assert found
    assert float(found[1]) > 95


@pytest.mark.slow
def test_the_example_with_two_optimizers(commands: Commands) -> None:
    ended = commands.spartito(
        "run", "--strategy", "mirrored", "--workers", "2", EXAMPLES / "gan.py"
    )
    assert ended.code == 0, ended.text
    found = re.search(r"mean radius of what it paints: ([\d.]+)", ended.out)
    assert found
    assert 0.85 < float(found[1]) < 1.15
