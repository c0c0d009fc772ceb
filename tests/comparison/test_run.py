from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spartito import system
from spartito.cli import main
from spartito.comparison.plan import Asked, Plan, make_plan
from spartito.comparison.run import ProcessRunner, command
from spartito.errors import UserError
from spartito.folders import LOCK
from spartito.launch.containers.launcher import Compose
from spartito.registry import names_anywhere
from tests.commands import SPARTITO, Commands, commands_in
from tests.skips import need, skip

KNOWN = ("mirrored", "multi_worker_mirrored", "one_device", "parameter_server")

SCRIPT = """
import json, os, pathlib, signal, sys

strategy = os.environ["SPARTITO_STRATEGY"]
if strategy in sys.argv[1:]:
    sys.exit(f"ValueError: {strategy} is not for me")
if f"wait:{strategy}" in sys.argv:
    print("now waiting", flush=True)
    signal.pause()
if os.environ.get("RANK", "0") == "0" and "silent" not in sys.argv:
    folder = pathlib.Path(os.environ["SPARTITO_RUN_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    epochs = int(os.environ["SPARTITO_EPOCHS"])
    (folder / "config.json").write_text(json.dumps({"fit": {"epochs": epochs}}))
    with open(folder / "history.jsonl", "w") as file:
        for epoch in range(1, 2 if f"short:{strategy}" in sys.argv else epochs + 1):
            loss = None if f"nan:{strategy}" in sys.argv else 1 / epoch
            line = {"epoch": epoch, "step": 10 * epoch, "loss": loss, "val_accuracy": 0.9,
                    "seconds": 0.5, "examples_per_second": 100.0}
            file.write(json.dumps(line) + chr(10))
    print("trained under", strategy)
"""
"""Leaves what a Trainer leaves, without the seconds that torch takes to start."""


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as found:
        found.write("train.py", SCRIPT)
        yield found


def words(*more: str, strategies: str = "one_device,mirrored") -> list[str]:
    given = ["compare", "train.py", "--strategies", strategies, "--epochs", "2", "--out", "out"]
    return [*given, *more]


def written(commands: Commands) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((commands.directory / "out" / "compare.json").read_text())
    return found


def test_one_strategy_fails_and_the_others_go_on(commands: Commands) -> None:
    ended = commands.spartito(
        *words("--goal", "val_accuracy=0.9", "--", "mirrored", strategies="mirrored,one_device"),
        env={"SPARTITO_RUN_DIR": "elsewhere", "SPARTITO_STRATEGY": "nothing"},
    )
    assert ended.code == 1, ended.text
    assert "spartito: run 1 of 2: mirrored, 2 workers" in ended.err
    assert "spartito: run 2 of 2: one_device, 1 worker" in ended.err
    assert "trained under one_device" in ended.out
    assert "mirrored failed: " in ended.out
    assert "Only one_device ended well" in ended.out
    assert "1 of 2 runs failed: mirrored" in ended.err
    found = written(commands)
    bad, good = found["runs"]
    assert (bad["strategy"], bad["workers"], bad["exit_code"]) == ("mirrored", 2, 1)
    assert "ValueError: mirrored is not for me" in bad["error"]
    assert bad["history"] == []
    assert (good["strategy"], good["workers"], good["exit_code"]) == ("one_device", 1, 0)
    assert good["error"] is None
    assert [epoch["step"] for epoch in good["history"]] == [10, 20]
    assert good["run"] == "one_device"
    assert good["seconds"] > 0
    if system.IS_LINUX:
        assert 0 <= good["load"]["others"] <= 1
        assert good["load"]["own"] > 0
    assert (found["target"], found["arguments"]) == ("train.py", ["mirrored"])
    assert found["goal"] == {"name": "val_accuracy", "value": 0.9}
    assert found["machine"]["cores"] >= 1
    assert found["sentences"]
    page = (commands.directory / "out" / "compare.html").read_text()
    assert "mirrored is not for me" in page
    assert not (commands.directory / "elsewhere").exists()


def test_all_goes_well(commands: Commands) -> None:
    ended = commands.spartito(
        *words("--sweep", "workers=1,2", "--repeat", "2", strategies="one_device,mirrored"),
    )
    assert ended.code == 0, ended.text
    assert [
        (run["run"], run["workers"], run["sweep"], run["error"])
        for run in written(commands)["runs"]
    ] == [
        ("one_device", 1, None, None),
        ("mirrored", 2, None, None),
        ("mirrored-workers-1", 1, "workers", None),
        ("one_device-repeat-2", 1, None, None),
        ("mirrored-repeat-2", 2, None, None),
        ("mirrored-workers-1-repeat-2", 1, "workers", None),
    ]
    assert (commands.directory / "out/mirrored-workers-1/history.jsonl").exists()


def test_a_run_that_diverged_is_not_chosen(commands: Commands) -> None:
    ended = commands.spartito(*words("--", "nan:mirrored"))
    assert ended.code == 0, ended.text
    assert "Only one_device ended well" in ended.out
    assert "mirrored diverged: its loss is NaN from epoch 1 of 2 on" in ended.out
    assert "1 of 2 runs diverged: mirrored" in ended.err
    page = (commands.directory / "out" / "compare.html").read_text()
    assert "mirrored (its loss is NaN from epoch 1 of 2 on) diverged" in page


def test_all_that_diverged_have_an_exit_code_of_their_own(commands: Commands) -> None:
    ended = commands.spartito(*words("--", "nan:mirrored", "nan:one_device"))
    assert ended.code == 3, ended.text
    assert "All runs diverged" in ended.out


def test_a_run_that_did_not_finish_is_said(commands: Commands) -> None:
    ended = commands.spartito(*words("--", "short:mirrored"))
    assert ended.code == 1, ended.text
    assert "mirrored did not finish: it ended after 1 of 2 epochs without an error" in ended.out
    assert "1 of 2 runs did not finish: mirrored" in ended.err


def test_one_device_is_trained_with_the_threads_of_the_others_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()

    def runs(**given: Any) -> list[tuple[str, int | None]]:
        found = make_plan(Asked(str(script), known=KNOWN, out=tmp_path / "out", **given)).runs
        return [(run.folder, run.threads) for run in found]

    some = {"strategies": "one_device,mirrored"}
    assert runs(**some, workers=2, cores=8) == [
        ("one_device", None), ("one_device-threads-4", 4), ("mirrored", None)
    ]  # fmt: skip
    assert runs(**some, workers=4, cores=2)[1] == ("one_device-threads-1", 1)
    for same in ({"cores": None}, {"cores": 1}, {"cores": 8, "workers": 1}):
        assert len(runs(**some, **same)) == 2
    assert runs(strategies="one_device", cores=8) == [("one_device", None)]
    assert runs(strategies="mirrored", cores=8) == [("mirrored", None)]


def test_the_threads_reach_the_process(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    script, out = str(tmp_path / "train.py"), tmp_path / "out"
    asked = Asked(script, strategies="one_device,mirrored", known=KNOWN, out=out, cores=8)
    made = make_plan(asked)
    told = [
        ProcessRunner(made).prepare(run).environment.get("OMP_NUM_THREADS") for run in made.runs
    ]
    assert told == [None, "4", None]


def test_ctrl_c_keeps_what_there_is(commands: Commands) -> None:
    program = commands.start(*SPARTITO, *words("--", "wait:mirrored"))
    program.wait_for("now waiting")
    program.send(signal.SIGINT)
    ended = program.end()
    assert ended.code == 130, ended.text
    first, second = written(commands)["runs"]
    assert (first["strategy"], first["error"]) == ("one_device", None)
    assert (second["strategy"], second["exit_code"]) == ("mirrored", 130)
    assert second["error"]
    assert "stopped by SIGINT after 2 of 2 runs" in ended.err
    assert (commands.directory / "out" / "compare.html").exists()


def test_nothing_outlives_a_comparison_that_is_killed(commands: Commands) -> None:
    program = commands.start(*SPARTITO, *words("--", "wait:mirrored"))
    program.wait_for("now waiting")
    program.send(signal.SIGKILL)
    assert program.end().code == -signal.SIGKILL
    (only,) = written(commands)["runs"]
    assert only["strategy"] == "one_device"


def test_a_run_without_a_history_is_a_failure_that_says_so(commands: Commands) -> None:
    ended = commands.spartito(*words("--", "silent", strategies="one_device"))
    assert ended.code == 1
    assert "left no history" in written(commands)["runs"][0]["error"]


def test_a_goal_that_no_run_knows_ends_after_the_first(commands: Commands) -> None:
    ended = commands.spartito(*words("--goal", "val_acuracy=0.9"))
    assert ended.code == 2
    assert "no run reports 'val_acuracy'" in ended.err
    assert "Did you mean 'val_accuracy'?" in ended.err
    assert len(written(commands)["runs"]) == 1


def test_the_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--help"]) == 0
    assert "Example: spartito compare mnist" in " ".join(capsys.readouterr().out.split())


def test_a_mistake_starts_nothing(commands: Commands) -> None:
    ended = commands.spartito(*words(strategies="mirored"))
    assert ended.code == 2
    assert "Did you mean 'mirrored'?" in ended.err
    assert not (commands.directory / "out").exists()


def plan(target: str = "mnist", *arguments: str, **given: Any) -> Plan:
    return make_plan(Asked(target, arguments, **{"known": KNOWN, **given}))


def test_all_strategies_from_the_simplest_on() -> None:
    found = plan(workers=3, ps=2, batch_size=32)
    assert [(run.strategy.name, run.workers, run.ps, run.batch_size) for run in found.runs] == [
        ("one_device", 1, 0, 32),
        ("mirrored", 3, 0, 32),
        ("multi_worker_mirrored", 3, 0, 32),
        ("parameter_server", 3, 2, 32),
    ]
    assert {run.strategy.name for run in make_plan(Asked("mnist")).runs} == set(names_anywhere())


def test_a_parameter_server_is_one_by_default() -> None:
    (run,) = plan(strategies="parameter_server").runs
    assert (run.workers, run.ps) == (2, 1)


def test_the_order_of_the_user_stays_and_each_comes_once() -> None:
    found = plan(strategies="parameter_server, mirrored,mirrored")
    assert [run.strategy.name for run in found.runs] == ["parameter_server", "mirrored"]


def test_repeats_take_turns_and_have_seeds_of_their_own() -> None:
    found = plan(repeat=2, sweep=["workers=1"], strategies="one_device,mirrored")
    assert [run.folder for run in found.runs] == [
        "one_device",
        "mirrored",
        "mirrored-workers-1",
        "one_device-repeat-2",
        "mirrored-repeat-2",
        "mirrored-workers-1-repeat-2",
    ]
    assert [run.setting for run in found.runs[:3]] == [run.setting for run in found.runs[3:]]
    assert [found.seed_of(run) for run in found.runs] == [None] * 3 + [1338] * 3
    named = plan(repeat=2, seed=7, strategies="one_device")
    assert [named.seed_of(run) for run in named.runs] == [7, 8]


def test_sweeps_add_the_runs_that_are_not_there_yet() -> None:
    found = plan(
        strategies="one_device,mirrored",
        batch_size=128,
        sweep=["workers=4,1,2,2", "batch_size=32,128"],
    )
    assert [run.folder for run in found.runs] == [
        "one_device",
        "mirrored",
        "mirrored-workers-1",
        "mirrored-workers-4",
        "one_device-batch-size-32",
        "mirrored-batch-size-32",
    ]
    assert {run.batch_size for run in found.runs[:4]} == {128}


def test_a_strategy_with_options_is_one_of_its_own() -> None:
    found = plan(
        strategies='local_sgd, local_sgd(every=50, compress="topk:0.01"), local_sgd(outer=None)',
        sweep=["workers=1"],
    )
    assert [run.folder for run in found.runs[1:5]] == [
        "local_sgd-compress-topk-0.01-every-50",
        "local_sgd-outer-None",
        "local_sgd-workers-1",
        "local_sgd-compress-topk-0.01-every-50-workers-1",
    ]
    assert str(found.runs[1]) == 'local_sgd(compress="topk:0.01", every=50), 2 workers'
    assert '--strategy=local_sgd(compress="topk:0.01", every=50)' in command(found, found.runs[1])
    assert "--strategy=local_sgd" in command(found, found.runs[0])


def test_strategies_with_options_train_side_by_side(commands: Commands) -> None:
    more = ["--strategies", "mirrored(timeout=9)", "--strategies", "mirrored(timeout=5,)"]
    ended = commands.spartito(*words(*more, strategies='mirrored, mirrored(communication="auto")'))
    assert ended.code == 0, ended.text
    texts = [
        "mirrored",
        'mirrored(communication="auto")',
        "mirrored(timeout=9)",
        "mirrored(timeout=5)",
    ]
    assert [run["strategy"] for run in written(commands)["runs"]] == texts
    page = (commands.directory / "out" / "compare.html").read_text()
    assert all(text.replace('"', "&#34;") in page for text in texts)
    assert all(f"trained under {text}" in ended.out for text in texts)


def test_on_a_line_strategies_of_one_machine_are_left_out() -> None:
    found = plan(link="100mbit,5ms")
    names = [run.strategy.name for run in found.runs]
    assert names == ["one_device", "multi_worker_mirrored", "parameter_server"]
    (why,) = found.left_out
    assert why.startswith("mirrored is left out: it is for one machine, and at --link 100mbit,5ms")
    assert all("--link=100mbit,5ms" in command(found, run) for run in found.runs)
    alone = plan(link="100mbit", workers=1)
    assert "mirrored" in [run.strategy.name for run in alone.runs]


def test_every_run_is_on_the_line(commands: Commands) -> None:
    need("netns")
    given = words("--link", "100mbit", strategies="multi_worker_mirrored,local_sgd(every=5)")
    ended = commands.spartito(*given)
    if "network namespaces" in ended.err:
        assert ended.code == 2
        skip("netns", ended.err)
    assert ended.code == 0, ended.text
    found = written(commands)
    assert (found["link"], found["line"]) == ("100 Mbit/s", "100mbit")
    texts = [run["strategy"] for run in found["runs"]]
    assert texts == ["multi_worker_mirrored", "local_sgd(every=5)"]
    assert "local_sgd(every=5)" in ended.out
    page = (commands.directory / "out" / "compare.html").read_text()
    assert "line of each task" in page
    assert "local_sgd(every=5)" in page


def test_only_runs_with_the_slow_task_are_slowed() -> None:
    found = plan(slow=["worker:1=0.25", "worker:0=1"], sweep=["workers=1"], strategies="all")
    assert {run.folder: dict(run.slow) for run in found.runs} == {
        "one_device": {},
        "mirrored": {"worker:1": 0.25},
        "multi_worker_mirrored": {"worker:1": 0.25},
        "parameter_server": {"worker:1": 0.25},
        "mirrored-workers-1": {},
        "multi_worker_mirrored-workers-1": {},
        "parameter_server-workers-1": {},
    }
    assert str(found.runs[3]) == "parameter_server, 2 workers, 1 ps, worker:1 at 25%"


def test_what_a_recipe_is_started_with(tmp_path: Path) -> None:
    found = plan(
        strategies="parameter_server",
        epochs=3,
        seed=7,
        data="digits",
        batch_size=64,
        slow=["worker:1=0.5"],
        out=tmp_path / "new",
    )
    assert command(found, found.runs[0])[1:] == [
        *("-m", "spartito", "run", "--no-config"),
        *("--strategy=parameter_server", "--workers=2", "--ps=1"),
        *("--slow=worker:1=0.5", "-m", "spartito.recipes.mnist"),
        *(f"--out={tmp_path}/new/parameter_server", "--data=digits", "--epochs=3"),
        *("--batch-size=64", "--seed=7"),
    ]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"target": "mnits"}, ["'mnits'", "neither a script nor a recipe", "'mnist'"]),
        ({"target": "no_such.py"}, ["no script 'no_such.py'"]),
        ({"arguments": ["--lr"]}, ["'--lr'", "no arguments"]),
        ({"strategies": "mirrored,mirored"}, ["'mirored'", "'mirrored'"]),
        ({"strategies": ","}, ["expected the name of a strategy", "mirrored"]),
        ({"ps": 0}, ["--ps 0"]),
        ({"ps": 2, "strategies": "mirrored"}, ["--ps 2", "parameter_server"]),
        ({"goal": "0.95"}, ["'0.95'", "val_accuracy=0.95"]),
        ({"goal": "val_accuracy"}, ["'val_accuracy'", "val_accuracy=0.95"]),
        ({"goal": "val_accuracy=high"}, ["'val_accuracy=high'"]),
        ({"goal": "val_accuracy=nan"}, ["'val_accuracy=nan'"]),
        ({"sweep": ["worker=1,2"]}, ["'worker=1,2'", "Did you mean 'workers'?"]),
        ({"sweep": ["workers"]}, ["'workers'", "workers=1,2,4"]),
        ({"sweep": ["workers=1,two"]}, ["'workers=1,two'", "whole numbers"]),
        ({"sweep": ["workers=0"]}, ["'workers=0'", "above 0"]),
        ({"sweep": ["workers=1", "workers=2"]}, ["workers twice"]),
        ({"slow": ["worker:1"]}, ["'worker:1'"]),
        ({"slow": ["worker:7=0.5"]}, ["worker:7", "worker:1"]),
        ({"slow": ["worker:1=1.5"]}, ["1.5"]),
        ({"strategies": "mirrored:4bit"}, ["':' after mirrored", "parentheses"]),
        ({"strategies": "mirrored, mirored(a=1)"}, ["'mirored'", "'mirrored'", "            ^"]),
        ({"link": "fast"}, ["'fast'", "100mbit"]),
        ({"link": "1gbit", "strategies": "mirrored"}, ["mirrored is for one machine", "1gbit"]),
        ({"link": "1gbit", "containers": Compose()}, ["--link 1gbit", "--on compose"]),
    ],
)
def test_each_mistake_names_the_value_and_the_rule(given: dict[str, Any], says: list[str]) -> None:
    options = {"target": "mnist", "arguments": [], "known": KNOWN, **given}
    with pytest.raises(UserError) as error:
        make_plan(Asked(**options))
    assert all(part in str(error.value) for part in says), str(error.value)


@pytest.mark.parametrize(
    "given", [{"data": Path("x")}, {"batch_size": 3}, {"seed": 1}, {"sweep": ["batch_size=1"]}]
)
def test_what_only_recipes_take(tmp_path: Path, given: dict[str, Any]) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(UserError, match="is for recipes"):
        plan(str(script), **given)
    assert plan(str(script), "--lr", "3").program.arguments == ("--lr", "3")


def test_a_script_with_a_slip_of_the_pen(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(UserError, match=r"Did you mean .*train\.py"):
        plan(str(tmp_path / "trian.py"))


def test_an_earlier_comparison_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()  # of one that was killed before its first run
    assert plan(out=tmp_path).out == tmp_path
    (tmp_path / "compare.json").touch()
    with pytest.raises(UserError, match="is not empty"):
        plan(out=tmp_path)


@pytest.mark.parametrize("module", ["run", "plan"])
def test_a_comparison_starts_without_torch(module: str) -> None:
    code = (
        f"import sys, spartito.comparison.{module}\n"
        "print([m for m in ('torch', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
