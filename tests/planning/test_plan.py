"""The command: its table and JSON, profiles in files, wrong input, and a real profile."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import spartito as sp
from spartito.cli import main
from spartito.data.batch import Batch
from spartito.declared import parse
from spartito.engine.devices.denormals import flushes
from spartito.errors import UserError
from spartito.launch.job import Program
from spartito.launch.lines.line import Link
from spartito.names import ENV_CROWD, ENV_PROFILE
from spartito.planning import measure
from spartito.planning.check import check
from spartito.planning.cluster import Cluster, Kind
from spartito.planning.costs.parts import Situation
from spartito.planning.measure import NOT_INHERITED, _exchanging, memory_of, profile_of
from spartito.planning.probe import together
from spartito.planning.profile import Overhead, Profile
from spartito.planning.reference import BATCH, BETWEEN, STEPS, TRIED, Shape, overheads
from spartito.planning.search import predict
from spartito.training.trials import step_profile
from spartito.training.trials.neighbours import Neighbours
from spartito.training.trials.step_profile import _tokens
from tests.planning import quick_probe
from tests.planning.made import PROFILE, cluster


@pytest.fixture
def saved(tmp_path: Path) -> str:
    path = tmp_path / "p.json"
    path.write_text(PROFILE.text())
    return str(path)


def test_a_table_says_what_is_fastest_and_how_to_run_it(
    saved: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--machines=4", "--link=1gbit", "--goal=epochs=3", "--price=0.5", "--fail=1/day"]
    assert main(["plan", "--profile", saved, "--batch-size=512", *words]) == 0
    out = capsys.readouterr().out
    assert "on 4 machines with 2 workers each at 1 Gbit/s" in out
    assert "not possible: mirrored: mirrored is for one machine" in out
    for column in ("to the goal", "price", "lost", "limited by", "own work"):
        assert column in out.splitlines()[2]
    assert "To run it:     spartito run --hosts HOST1,HOST2,... --strategy" in out
    assert "most would help" in out


def test_json_has_all_of_it_by_speed(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--profile", saved, "--workers=4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rates = [each["examples_per_second"] for each in found["choices"]]
    assert rates == sorted(rates, reverse=True)
    first = found["choices"][0]
    assert first["step_seconds"] == pytest.approx(sum(first["seconds"].values()))
    assert first["step_seconds_low"] < first["step_seconds"] < first["step_seconds_high"]
    assert {"pipeline", "mesh", "sharded", "parameter_server"} <= {
        each["strategy"].partition("(")[0] for each in found["choices"]
    }


CLUSTER = """
machines:
  big: {count: 2, cores: 8, memory: 32GB, price: 0.8}
  small: {count: 1, cores: 4, memory: 8GB, price: 0.2, speed: 0.5}
link: 10gbit
workers: 2
"""


def test_machines_come_from_a_file(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    assert main(["plan", "--profile", saved, "--on", str(file), "--goal=steps=10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tasks"] == 6
    assert found["memory_limit"] == 4e9  # a worker of the small machine
    assert found["choices"][0]["price_to_goal"] > 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (CLUSTER.replace("cores: 8", "cores: 0"), "big: cores is 0"),
        (CLUSTER.replace("cores: 8", "core: 8"), "big has an unknown key 'core'"),
        (CLUSTER.replace("link: 10gbit", "link: 10"), "'10' is not a rate and a delay"),
        (CLUSTER.replace("link: 10gbit", ""), "3 machines, and no line between them"),
        (CLUSTER.replace("32GB", "32"), "big: memory"),
        (CLUSTER.replace("count: 2", "count: 1.5"), "big: count is 1.5"),
        (CLUSTER.replace("price: 0.8", "price: dear"), "big: price is 'dear'"),
        ("machines: {}", "names no machines"),
        ("[1", "cannot be read"),
        ("3", "is 3, and no mapping"),
    ],
)
def test_wrong_machines_are_refused(
    saved: str, tmp_path: Path, text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text.replace("memory: 32,", "memory: 32 apples,"))
    assert main(["plan", "--profile", saved, "--on", str(file)]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--link=1000", "--machines=2"], "'1000' is not a rate and a delay"),
        (["--machines=2"], "2 machines, and no line between them"),
        (["--goal=val_accuracy=0.9"], "not what they teach"),
        (["--goal=tokens=1e9"], "the examples of train.py are no tokens"),
        (["--goal=epochs=many"], "has no number above 0"),
        (["--memory=1MB"], "needs the least: --memory 0.4GB would do"),
        (["--memory=16"], "'16' is no size"),
        (["--fail=often"], "does not say how often one machine fails"),
        (["--workers=0"], "--workers 0 is less than 1"),
        (["--workers=100", "--strategies=mirrored"], "a global batch of 64 for 100 replicas"),
        (["--strategies=mirored"], "Did you mean 'mirrored'"),
        (["--on=no.yaml"], "--on no.yaml cannot be read"),
        (["--on=no.yaml", "--machines=2"], "exclude each other"),
        (["--save-profile=x"], "exclude each other"),
        (["--check=nowhere"], "no comparison"),
        (["--data=here"], "--data is for recipes"),
        (["gpt"], "--profile is of train.py, and not of gpt"),
    ],
)
def test_what_cannot_be_ends_with_2_and_says_why(
    saved: str, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--profile", saved, *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": 99}, "has version 99, and this reads 6"),
        ({"kind": "cake"}, "is no profile"),
        ({"samples": []}, "is damaged"),
        ({"extra": 1}, "is damaged: unknown extra"),
        ({"machine": {"cores": 2}}, "is damaged"),
    ],
)
def test_other_files_are_no_profiles(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(json.loads(PROFILE.text()) | change))
    with pytest.raises(UserError, match=told):
        Profile.read(path)


def test_a_script_that_changed_is_another_model(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    assert main(["plan", str(script), "--profile", saved]) == 2
    assert "made before train.py or its arguments changed" in capsys.readouterr().err


def test_nothing_is_overwritten(saved: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    before = Path(saved).read_text()
    assert main(["plan", str(script), "--save-profile", saved]) == 2
    assert Path(saved).read_text() == before


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("print('nothing here trains')", "ended without training: it never calls Trainer.fit"),
        ("import sys; sys.exit('no data')", "ended with exit code 1 before it trained:\nno data"),
    ],
)
def test_a_script_that_does_not_train_is_refused(
    tmp_path: Path, text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert main(["plan", str(script)]) == 2
    assert told in capsys.readouterr().err


class Refuses(sp.Callback):
    """No callback is called while a step is measured."""

    def on_train_begin(self) -> None:
        raise AssertionError("it trains")


def test_what_cannot_be_profiled_is_refused(
    saved: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path(saved).write_text(replace(PROFILE, device="cuda").text())
    assert main(["plan", "--profile", saved]) == 2
    assert "a device of kind cuda" in capsys.readouterr().err
    monkeypatch.setenv(ENV_PROFILE, str(tmp_path / "steps.json"))
    net = nn.Sequential(nn.Linear(20, 4))
    strategy = sp.PipelineStrategy(stages=1)
    trainer = sp.Trainer(net, optimizer=torch.optim.Adam, loss=nn.MSELoss(), strategy=strategy)
    with pytest.raises(UserError, match="the script makes pipeline"):
        trainer.fit((torch.randn(8, 20), torch.randn(8, 4)))


def test_a_training_is_profiled_and_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_profile, "SECONDS", 0.3)
    monkeypatch.setattr(step_profile, "available_cores", lambda: 1)  # threads that wait are slow
    monkeypatch.setenv(ENV_PROFILE, str(tmp_path / "steps.json"))
    monkeypatch.setenv(ENV_CROWD, "2,9")
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(net.parameters())
    trainer = sp.Trainer(
        net,
        optimizer=optimizer,
        loss=nn.CrossEntropyLoss(),
        metrics="accuracy",
        run_dir=tmp_path / "kept",
    )
    kept = sp.callbacks.ModelCheckpoint(str(tmp_path / "kept"))
    data = torch.randn(400, 20), torch.randint(4, (400,))
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit) as ended:
        trainer.fit(data, batch_size=40, epochs=2, callbacks=[kept, Refuses()])
    assert ended.value.code == 0
    assert torch.get_num_threads() == threads
    assert not (tmp_path / "kept").exists()
    steps = json.loads((tmp_path / "steps.json").read_text())
    model = steps["model"]
    nbytes = sum(p.numel() for p in net.parameters()) * 4
    assert (model["parameters"], model["gradients"], model["tensors"]) == (nbytes, nbytes, 6)
    assert model["optimizer"] >= 2 * nbytes
    assert {sample["batch"] for sample in steps["samples"]} == {10, 40}
    assert steps["examples"] == 400
    assert steps["steps_per_epoch"] == 10
    # Of each example 64 numbers behind the first layer, ReLU and the second one; 4 are returned.
    least = 4 * (64 + 64 + 4)
    assert least <= steps["activations"]["bytes"] / steps["activations"]["batch"] <= 4 * least
    assert [part["name"] for part in steps["parts"]] == ["", "1", "2", "3"]
    assert [part["output"] for part in steps["parts"]] == [64 * 4, 64 * 4, 64 * 4, 0]
    assert [part["parameters"] for part in steps["parts"]] == [
        21 * 64 * 4,
        0,
        65 * 64 * 4,
        65 * 4 * 4,
    ]
    assert steps["uncut"] == ""
    assert set(steps["slowdowns"]) == {"1", "2"}  # three layers
    assert min(steps["slowdowns"].values()) > 0
    assert steps["adding"] > 0
    assert steps["mesh"]["2"]["parameters"] < 0.7
    assert steps["mesh"]["2"]["passes"] != steps["mesh"]["2"]["parameters"]  # it was measured
    assert steps["contention"] is None
    assert set(steps["crowds"]) == {"2"}  # eight forks are too many
    assert steps["crowds"]["2"] > 0

    (tmp_path / "sets.py").write_text("import os, torch\nos.environ['OMP_NUM_THREADS'] = '1'\n")
    (tmp_path / "trains.py").write_text("import torch\n")
    steps |= {"started": 1.0, "fork_saves": 50}
    for name, saves in (("sets.py", 0), ("trains.py", 50)):
        script = Program(str(tmp_path / name))
        assert profile_of(script, steps, exchanged(steps)).fork_saves == saves
    found = profile_of(Program("mnist", kind="recipe"), steps, exchanged(steps))
    assert found.machine.crowds == {2: steps["crowds"]["2"]}
    assert found.machine.contention == 0.2  # no core for a neighbour: what the exchange saw
    assert found.machine.overheads["mirrored"].meeting > 0.9
    assert found.machine.overheads["mirrored"].epoch == pytest.approx(2.0)
    assert found.machine.overheads["sharded"].meeting == 0
    assert set(found.machine.overheads_between) == {"sharded"}
    file = tmp_path / "p.json"
    file.write_text(found.text())
    assert Profile.read(file) == found
    capsys.readouterr()
    assert main(["plan", "--profile", str(file), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["choices"]) > 5


def exchanged(steps: dict[str, Any]) -> dict[str, Any]:
    """What `spartito.planning.probe` writes, with round numbers."""
    return {
        "sockets": [[1e3, 1e-4], [1e6, 1e-3]], "memory": [[1e3, 1e-5], [1e6, 2e-4]],
        "contention": 0.2, "copy": 1e-10, "disk": 1e8,
        "codes": {"8bit": {"bytes": 0.25, "pack": 1e-9, "unpack": 1e-9}},
        "reference": steps,
        "between": {"sharded": [[40, 41.0], [120, 121.0]]},
        "trials": {"mirrored": [[40, 42.0], [120, 122.0]], "sharded": [[40, 0.0], [120, 0.0]]},
    }  # fmt: skip


def test_what_cannot_be_computed_beside_is_left_to_the_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise RuntimeError("a fork failed in its first step")

    monkeypatch.setattr(step_profile, "SECONDS", 0.1)
    monkeypatch.setattr(step_profile, "available_cores", lambda: 2)
    monkeypatch.setattr(Neighbours, "_fork", refuses)
    monkeypatch.setenv(ENV_PROFILE, str(tmp_path / "steps.json"))
    net = nn.Linear(20, 4)
    trainer = sp.Trainer(net, optimizer=torch.optim.Adam, loss=nn.MSELoss())
    with pytest.raises(SystemExit):
        trainer.fit((torch.randn(80, 20), torch.randn(80, 4)), batch_size=8)
    assert json.loads((tmp_path / "steps.json").read_text())["contention"] is None


class Counts(nn.Linear):
    """Its forward pass changes what no buffer is."""

    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().forward(x)


def test_why_no_pipeline_trains_a_model_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_profile, "SECONDS", 0.1)
    monkeypatch.setattr(step_profile, "available_cores", lambda: 1)
    monkeypatch.setenv(ENV_PROFILE, str(tmp_path / "steps.json"))
    trainer = sp.Trainer(Counts(20, 4), optimizer=torch.optim.Adam, loss=nn.MSELoss())
    with pytest.raises(SystemExit):
        trainer.fit((torch.randn(80, 20), torch.randn(80, 4)), batch_size=8)
    why = json.loads((tmp_path / "steps.json").read_text())["uncut"]
    assert why.startswith("a pipeline cannot train the model: each forward pass changes 'passes'")
    own = Situation(replace(PROFILE, uncut=why), cluster(workers=2), 64)
    with pytest.raises(UserError) as refused:
        predict(parse("pipeline"), own)
    assert why in str(refused.value)


def test_a_plan_trains_in_no_folder_of_the_users_trainings() -> None:
    assert {ENV_PROFILE, "SPARTITO_RUN_DIR", "SPARTITO_SNAPSHOT_DIR"} <= set(NOT_INHERITED)


@pytest.mark.slow
@pytest.mark.parametrize("is_quick", [True, pytest.param(False, marks=pytest.mark.night)])
def test_processes_of_this_machine_find_out_what_strategies_take(
    is_quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, slow = STEPS, (10, 30)
    if is_quick:
        monkeypatch.setattr(measure, "probe", quick_probe)
        usual, slow = (8, 24), (2, 6)
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ["PYTHONPATH"]])
    with _exchanging(tmp_path, os.environ | {"PYTHONPATH": path}) as exchange:
        found = exchange({"tensors": 6, "parameters": 40_000}, True)
    assert (set(found["trials"]), set(found["between"])) == (set(TRIED), set(BETWEEN))
    for text, ((few, short), (many, long)) in [*found["trials"].items(), *found["between"].items()]:
        assert (few, many) == (slow if text == "pipeline" else usual)
        assert min(short, long) > 0  # on a busy machine either may be the longer one
    assert min(seconds for _, seconds in found["sockets"]) > 0
    assert {sample["batch"] for sample in found["reference"]["samples"]} == {BATCH / 4, BATCH}
    assert found["reference"]["model"]["tensors"] == 6
    steps = {**found["reference"], "steps_per_epoch": None, "started": 1.0}
    reference = profile_of(Program("mnist", kind="recipe"), steps, found)
    assert set(reference.machine.overheads) == set(TRIED)
    assert set(reference.machine.overheads_between) == set(BETWEEN)


def test_long_steps_are_tried_fewer_times() -> None:
    assert Shape.like(6, 40_000).steps("mirrored") == STEPS
    assert Shape.like(6, 4_000_000).steps("mirrored") == (10, 30)


def test_tasks_that_fail_are_told_apart_from_slow_ones(capfd: pytest.CaptureFixture[str]) -> None:
    assert together(partial(pow, 2, 5), 2) == 32
    with pytest.raises(RuntimeError, match="a job of 2 tasks on this machine did not end well"):
        together(partial(divmod, 1, 0), 2)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_what_was_tried_counts_for_strategies_with_the_same_options() -> None:
    meetings = {"sharded(zero=1)": 1.0, "sharded": 2.0, "mirrored": 3.0, "local_sgd": 40.0}
    own = {name: Overhead(each, 0.0) for name, each in meetings.items()}
    own["central_storage"] = Overhead(0.0, 50.0)
    profile = replace(PROFILE, machine=replace(PROFILE.machine, overheads=own))
    bare, with_it = (Situation(each, cluster(), 64) for each in (PROFILE, profile))
    for text, more in (
        ("sharded(zero=1)", 1.0),
        ("sharded(zero=2)", 2.0),  # what was tried without options stands for others
        ("sharded", 2.0),
        ("mirrored", 3.0),
        ("central_storage", 0.5),  # of an epoch of 100 steps
        ("one_device", 0.0),
        ("local_sgd(every=20)", 2.0),  # groups meet after 20 steps
        ("local_sgd(every=75)", 0.8),  # an epoch has 100: they meet at its end, too
    ):
        step = predict(parse(text), with_it).cost.step - predict(parse(text), bare).cost.step
        assert step == pytest.approx(more * 1.1)  # beside another task, as all that computes


def test_what_is_beyond_the_closed_form_is_an_overhead() -> None:
    small = Situation(PROFILE, cluster(), BATCH)
    step, apart = (predict(parse(text), small).cost.step for text in ("mirrored", "local_sgd"))
    seconds = {"mirrored": step + 0.5, "local_sgd": apart + 0.5, "sharded": 0.0, "tpu": 1.0}
    found = overheads(
        PROFILE, {name: [(40, 40 * s + 3), (120, 120 * s + 3)] for name, s in seconds.items()}
    )
    assert {name: (own.meeting, own.epoch) for name, own in found.items()} == {
        "mirrored": pytest.approx((0.5, 3.0)),
        "local_sgd": pytest.approx((10.0, 3.0)),
        "sharded": pytest.approx((0.0, 3.0)),
    }


@pytest.mark.parametrize(
    ("x", "tokens"),
    [
        (torch.zeros(2, 7, dtype=torch.int64), 7),
        ({"ids": torch.zeros(2, 7, dtype=torch.int64)}, 7),
        (torch.zeros(2, 7), None),
        (torch.zeros(2, 7, 3, dtype=torch.int64), None),
        ({"ids": torch.zeros(2, 7), "more": torch.zeros(2, 7)}, None),
    ],
)
def test_examples_of_whole_numbers_are_tokens(x: Any, tokens: int | None) -> None:
    assert _tokens(Batch((x, torch.zeros(2)), 2, 2, torch.arange(2), 0, 0)) == tokens


def run(strategy: str, rate: float, **more: Any) -> dict[str, Any]:
    epochs = [
        {"epoch": n, "step": 10 * n, "loss": 1 / n, "seconds": 1.0, "examples_per_second": rate}
        for n in (1, 2, 3)
    ]
    config = {"fit": {"epochs": 3, "batch_size": 512}}
    return {
        "strategy": strategy, "workers": 2, "ps": 0, "batch_size": 512, "history": epochs,
        "error": None, "tasks": [], "config": config, "run": strategy, **more,
    }  # fmt: skip


def test_predictions_beside_what_was_measured(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = cluster()
    record: dict[str, Any] = {"target": "train.py", "runs": [], "goal": None}
    predicted = {}
    for name in ("mirrored", "one_device"):
        record["runs"] = [run(name, 1000.0)]
        (tmp_path / "compare.json").write_text(json.dumps(record))
        predicted[name] = check(tmp_path, PROFILE, own).rows[0].predicted
    record["runs"] = [
        run("mirrored", predicted["mirrored"] / 1.25),
        run("one_device", predicted["one_device"]),
        run("multi_worker_mirrored(bucket_bytes=9)", 5.0),
        run("sharded", 5.0, slow={"worker 1": 0.5}),
        run("mirrored", 5.0, error="worker 1 was killed"),
    ]
    (tmp_path / "compare.json").write_text(json.dumps(record))
    found = check(tmp_path / "compare.json", PROFILE, own)
    assert [round(row.error, 6) for row in found.rows] == [0.25, 0.0]
    assert found.error == pytest.approx(0.125)
    assert len(found.left_out) == 3
    assert main(["plan", "--profile", saved, "--check", str(tmp_path)]) == 0
    assert "median error" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"the profile is of cake\.py"):
        check(tmp_path, replace(PROFILE, target="cake.py"), own)


def test_runs_at_a_line_are_predicted_on_namespaces_of_one_machine(tmp_path: Path) -> None:
    slow = {"worker 1": 0.25}
    runs = [
        run("multi_worker_mirrored", 1000.0),
        run("multi_worker_mirrored", 1000.0, slow=slow, setting="slow"),
        run("parameter_server", 1000.0, ps=1, slow={"ps 0": 0.5}),
    ]
    record: dict[str, Any] = {"target": "train.py", "runs": runs, "goal": None, "line": "1gbit"}
    (tmp_path / "compare.json").write_text(json.dumps(record))
    found = check(tmp_path, PROFILE, cluster())
    assert [str(why) for why in found.left_out] == [
        "parameter_server: a plan knows no servers that are slow"
    ]
    (tmp_path / "old").mkdir()
    old = {**record, "line": None, "link": "1 Gbit/s"}
    (tmp_path / "old" / "compare.json").write_text(json.dumps(old))
    with pytest.raises(UserError, match="an earlier version compared it on a line of 1 Gbit/s"):
        check(tmp_path / "old", PROFILE, cluster())
    kinds, quarter = cluster(machines=2).kinds, Kind("slow", 1, 4, 8e9, speed=0.25)
    link = Link.read("1gbit")
    for row, kind in zip(found.rows, (kinds, (*cluster().kinds, quarter)), strict=True):
        own = Cluster(kind, 1, link, shared=True)
        assert own.threads == 2  # of four cores
        assert own.memory == 4e9
        told = predict(parse("multi_worker_mirrored"), Situation(PROFILE, own, 512))
        assert row.predicted == told.cost.rate
    assert found.rows[1].predicted < found.rows[0].predicted / 2


def test_machines_that_share_cores_take_turns() -> None:
    machines = (Kind("namespace", 8, 4, 8e9),)
    own = Cluster(machines, 1, Link.read("1gbit"))
    together = replace(own, shared=True)
    assert (own.turns, together.turns) == (1.0, 2.0)
    assert (own.threads, together.threads) == (4, 1)
    text = parse("multi_worker_mirrored")
    apart, shared = (predict(text, Situation(PROFILE, each, 512)).cost for each in (own, together))
    assert shared.seconds["compute"] > 4 * apart.seconds["compute"]
    assert shared.seconds["link"] > apart.seconds["link"]


def test_a_process_grows_by_what_steps_need() -> None:
    model = {"gradients": 100, "optimizer": 200}
    steps: dict[str, Any] = {"activations": {"bytes": 40, "batch": 4}, "example_bytes": 1.0}
    grown = [(4, 100 + 200 + 4 * 20 + 50), (16, 100 + 200 + 16 * 20 + 50)]
    assert memory_of({**steps, "model": model, "grown": grown}) == pytest.approx((20, 50))
    assert memory_of({**steps, "model": model, "grown": grown[:1]}) == pytest.approx((12, 82))
    alike = [grown[0], grown[0]]
    assert memory_of({**steps, "model": model, "grown": alike}) == pytest.approx((12, 82))
    less = [(4, 10), (16, 12)]  # other memory was there already: what autograd keeps is known
    assert memory_of({**steps, "model": model, "grown": less}) == pytest.approx((12, 0))


class Sees(nn.Linear):
    """Notes whether denormal numbers are 0 where it computes."""

    seen: ClassVar[set[bool]] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add(flushes())
        return super().forward(x)


@pytest.mark.parametrize("flush", [True, False])
def test_steps_are_profiled_with_denormals_as_in_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: bool
) -> None:
    monkeypatch.setattr(step_profile, "SECONDS", 0.01)
    monkeypatch.setenv(ENV_PROFILE, str(tmp_path / "steps.json"))
    Sees.seen.clear()
    trainer = sp.Trainer(
        Sees(20, 4),
        optimizer=torch.optim.Adam,
        loss=nn.MSELoss(),
        strategy=sp.OneDeviceStrategy(flush_denormals=flush),
    )
    with pytest.raises(SystemExit):
        trainer.fit((torch.randn(8, 20), torch.randn(8, 4)), batch_size=8)
    assert Sees.seen == {flush}


SCRIPT = """
import torch, spartito as sp
net = torch.nn.Linear(100, 10)
trainer = sp.Trainer(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
                     loss=torch.nn.CrossEntropyLoss())
trainer.fit((torch.randn(1000, 100), torch.randint(10, (1000,))), batch_size=50)
"""


@pytest.mark.night
def test_a_script_from_its_profile_to_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    file = tmp_path / "p.json"
    assert main(["plan", str(tmp_path / "train.py"), "--save-profile", str(file), "--json"]) == 0
    names = {each["strategy"] for each in json.loads(capsys.readouterr().out)["choices"]}
    assert {"one_device", "mirrored"} <= names
    assert Profile.read(file).model.name == "Linear"
