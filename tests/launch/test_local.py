from __future__ import annotations

import json
import os
import subprocess
import sys
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.cluster import resolve
from spartito.comparison.plan import Asked, make_plan
from spartito.comparison.run import compare_strategies
from spartito.errors import UserError
from spartito.launch.hosts.job import Hosts
from spartito.launch.processes.local import RUNTIME, Local, Position, environments
from spartito.wire.ports import free_port
from tests.cluster.environments import hydra_alone, open_mpi, srun
from tests.cluster.orchestrated import TORCHRUN, indexed_job, pytorch_job
from tests.launch.jobs import start
from tests.skips import lacks, skip_if

LIMIT = 60.0
SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
TF_CONFIG = {"cluster": {"worker": ["a:1000", "a:2000", "b:1000"], "evaluator": ["c:1"]}}


def run(tmp_path: Path, *options: str, **env: str) -> tuple[list[tuple[str, Any, Any]], str]:
    """(task, arguments, environment) of each process that ``spartito run`` starts; stderr."""
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    clean = {k: v for k, v in os.environ.items() if k in {"PATH", "HOME", "PYTHONPATH"}}
    command = [sys.executable, "-m", "spartito", "run", *options]
    got = subprocess.run(
        [*command, str(script), "--epochs", "3"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=clean | env,
    )
    assert got.returncode == 0, got.stderr
    rows = []
    for line in got.stdout.splitlines():
        name, _, rest = line.rpartition("] [[")
        rows.append((name.lstrip("["), *json.loads("[[" + rest if name else line)))
    return sorted(rows, key=lambda row: int(row[2].get("RANK", 0))), got.stderr


def tf_config(kind: str, index: int) -> str:
    return json.dumps(TF_CONFIG | {"task": {"type": kind, "index": index}})


def test_each_worker_learns_who_it_is(tmp_path: Path) -> None:
    rows, _ = run(
        *(tmp_path, "--workers", "3", "--strategy", "mirrored(timeout=7.5)"),
        *("--strategy-options", '{"communication": "sockets"}'),
    )
    assert [row[0] for row in rows] == ["worker 0", "worker 1", "worker 2"]
    for rank, (_, arguments, env) in enumerate(rows):
        assert arguments == ["--epochs", "3"]
        expected = {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "3",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "SPARTITO_STRATEGY": 'mirrored(communication="sockets", timeout=7.5)',
            "PYTHONUNBUFFERED": "1",
            **RUNTIME,
        }
        assert expected.items() <= env.items()
        assert "SPARTITO_STRATEGY_OPTIONS" not in env
        assert int(env["OMP_NUM_THREADS"]) >= 1
        spec = resolve(env)
        assert (spec.rank, spec.world_size, spec.local_size) == (rank, 3, 3)
    assert len({row[2]["MASTER_PORT"] for row in rows}) == 1


def test_one_process_without_a_strategy_is_alone(tmp_path: Path) -> None:
    ((_, _, env),), _ = run(tmp_path, "--workers", "1")
    assert resolve(env).world_size == 1
    assert "SPARTITO_STRATEGY" not in env


def test_what_the_user_set_stays(tmp_path: Path) -> None:
    given_ = {
        "OMP_NUM_THREADS": "7",
        "TORCH_CPP_LOG_LEVEL": "INFO",
        "SPARTITO_RUN_DIR": str(tmp_path),
    }
    rows, _ = run(tmp_path, "--workers", "2", **given_)
    assert all(given_.items() <= env.items() for _, _, env in rows)


def test_several_machines_by_hand(tmp_path: Path) -> None:
    options = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1:29500"]
    rows, _ = run(tmp_path, "--workers", "2", *options, TF_CONFIG=tf_config("worker", 0))
    assert [row[0] for row in rows] == ["worker 2", "worker 3"]
    for local, (_, _, env) in enumerate(rows):
        spec = resolve(env)
        assert (spec.rank, spec.world_size) == (2 + local, 4)
        assert (spec.local_rank, spec.local_size) == (local, 2)
        assert spec.rendezvous == "10.0.0.1:29500"
        assert env["GROUP_RANK"] == "1"


def test_several_processes_of_one_tf_config_task(tmp_path: Path) -> None:
    rows, _ = run(tmp_path, "--workers", "2", TF_CONFIG=tf_config("worker", 1))
    assert [row[0] for row in rows] == ["worker 2", "worker 3"]
    for local, (_, _, env) in enumerate(rows):
        spec = resolve(env)
        assert "TF_CONFIG" not in env
        assert (spec.rank, spec.world_size) == (2 + local, 6)
        assert (spec.local_rank, spec.local_size) == (2 + local, 4)  # another task is on host a
        assert spec.rendezvous == "a:1000"


def test_one_process_is_the_tf_config_task_itself(tmp_path: Path) -> None:
    ((_, _, env),), _ = run(tmp_path, "--workers", "1", TF_CONFIG=tf_config("worker", 1))
    spec = resolve(env)
    assert "SPARTITO_SECRET" not in env  # who starts the others would not know it
    assert spec.name_of(1) == "worker 1 (a:2000)"
    by_torchruns_names = resolve({k: v for k, v in env.items() if k != "TF_CONFIG"})
    for one in (spec, by_torchruns_names):
        assert (one.rank, one.world_size, one.local_rank, one.local_size) == (1, 3, 1, 2)


def test_an_evaluator_is_one_process_without_a_rank(tmp_path: Path) -> None:
    ((_, _, env),), _ = run(tmp_path, "--workers", "2", TF_CONFIG=tf_config("evaluator", 0))
    assert "RANK" not in env
    assert str(resolve(env).task) == "evaluator 0"


@pytest.mark.parametrize(
    "env",
    [srun(3), srun(3, SPARTITO_PS="1"), open_mpi(3), indexed_job(1), TORCHRUN],
    ids=["srun", "srun with a server", "mpirun", "Kubernetes", "torchrun"],
)
def test_inside_of_a_schedulers_task_it_is_that_task(tmp_path: Path, env: dict[str, str]) -> None:
    name = "parameter_server" if resolve(env).addresses.get("ps") else "multi_worker_mirrored"
    ((_, _, told),), _ = run(tmp_path, "--strategy", name, **env)
    assert resolve(told) == resolve(env)
    assert told["SPARTITO_STRATEGY"] == name


def test_a_task_that_meets_the_others_in_a_directory_leaves_that_to_the_script(
    tmp_path: Path,
) -> None:
    meeting = {"SPARTITO_CLUSTER_DIR": str(tmp_path / "meeting"), "SPARTITO_WORKERS": "2"}
    ((_, _, told),), _ = run(tmp_path, **meeting, SPARTITO_TASK="worker 1")
    assert meeting.items() <= told.items()
    assert "RANK" not in told
    assert not (tmp_path / "meeting").exists()


def test_several_processes_of_a_schedulers_task_are_counted_over_all(tmp_path: Path) -> None:
    rows, _ = run(tmp_path, "--workers", "2", **pytorch_job(1))
    assert [name for name, _, _ in rows] == ["worker 2", "worker 3"]
    for local, (_, _, env) in enumerate(rows):
        spec = resolve(env)
        assert (spec.rank, spec.world_size) == (2 + local, 4)
        assert (spec.local_rank, spec.local_size) == (local, 2)
        assert spec.rendezvous == "train-master-0:23456"


def test_one_machine_by_hand_is_a_job_of_its_own(tmp_path: Path) -> None:
    ((_, _, env),), _ = run(tmp_path, "--nnodes", "1", **srun(3))
    assert resolve(env).world_size == 1


@skip_if(bool(why := lacks("mpi", "mpirun")), "mpi", why)
def test_mpirun_of_run_is_one_job(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(
        f"import os, pathlib; pathlib.Path({str(tmp_path)!r}, 'told.' + "
        "os.environ['OMPI_COMM_WORLD_RANK']).write_text(repr(dict(os.environ)))"
    )
    clean = {k: v for k, v in os.environ.items() if k in {"PATH", "HOME", "PYTHONPATH"}}
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
    got = subprocess.run(
        [*words, "-m", "spartito", "run", script],
        capture_output=True,
        text=True,
        env=clean,
        timeout=LIMIT,
    )
    assert got.returncode == 0, got.stderr
    specs = [resolve(literal_eval((tmp_path / f"told.{rank}").read_text())) for rank in range(2)]
    assert [(spec.rank, spec.world_size) for spec in specs] == [(0, 2), (1, 2)]
    assert len({spec.rendezvous for spec in specs}) == 1


def test_more_workers_than_cores_are_worth_a_note(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    rows, err = run(tmp_path, "--workers", str(cores + 1))
    assert len(rows) == cores + 1
    assert f"spartito: note: {cores + 1} workers share" in err


def test_nodes_that_meet_on_localhost_are_worth_a_note(tmp_path: Path) -> None:
    options = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "localhost:29500"]
    _, err = run(tmp_path, "--workers", "1", *options)
    assert "localhost is each machine itself" in err


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 64))
def test_ranks_of_all_nodes_are_all_ranks(nodes: int, workers: int, cores: int) -> None:
    specs = []
    for node in range(nodes):
        for env in environments({}, Position(node, nodes, "a", 1), workers, cores):
            assert env["OMP_NUM_THREADS"] == str(max(1, cores // workers))
            specs.append(resolve(env))
    assert [spec.rank for spec in specs] == list(range(nodes * workers))
    assert {spec.world_size for spec in specs} == {nodes * workers}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"strategy": "mirored"}, ["'mirored'", "'mirrored'"]),
        ({"strategy": "one_device", "workers": 2}, ["one_device", "2", "mirrored"]),
        ({"strategy": "one_device", "nnodes": 2, "master_addr": "a:1"}, ["one_device", "2"]),
        ({"strategy": "central_storage", "nnodes": 2, "master_addr": "a:1"}, ["1 of 2 replicas"]),
        ({"ps": -1}, ["--ps -1"]),
        ({"ps": 1, "strategy": "mirrored"}, ["mirrored with 1 ps"]),
        ({"ps": 1, "env": {"SPARTITO_STRATEGY": "mirrored"}}, ["mirrored with 1 ps"]),
        ({"ps": 1, "strategy": "mirored"}, ["'mirored'", "'mirrored'"]),
        ({"strategy": "parameter_server"}, ["without a parameter server", "--ps 1"]),
        ({"ps": 1, "nnodes": 2}, ["--ps 1 starts on one machine only", "TF_CONFIG"]),
        ({"evaluator": True, "master_addr": "a:1"}, ["--evaluator starts on one", "TF_CONFIG"]),
        (
            {"ps": 1, "env": {"TF_CONFIG": tf_config("worker", 0)}},
            ["--ps 1, but TF_CONFIG"],
        ),
        ({"ps": 1, "env": srun(1)}, ["--ps 1, but Slurm says already", "--nnodes 1"]),
        (
            {"workers": 2, "env": srun(1, SPARTITO_PS="1")},
            ["--workers 2", "Slurm is one process"],
        ),
        (
            {"master_addr": "a:1", "env": srun(1)},
            ["--master-addr a:1", "worker 1", "--nnodes"],
        ),
        ({"strategy": "one_device", "env": srun(1)}, ["one_device", "4"]),
        ({"env": hydra_alone(1)}, ["PMI_SIZE=2", "LOCAL_WORLD_SIZE"]),
        ({"slow": ("worker:1=0.5",)}, ["'worker:1'", "Known: worker:0"]),
        ({"slow": ("worker:0=0",)}, ["fraction 0"]),
        ({"strategy_options": "{"}, ["'{'", "not JSON"]),
        ({"strategy_options": "[1]"}, ["'[1]'", "JSON object"]),
        ({"workers": 0}, ["--workers 0"]),
        ({"nnodes": 0}, ["--nnodes 0"]),
        ({"nnodes": 2}, ["--nnodes 2", "--master-addr"]),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "a:1"}, ["--node-rank 2", "0 to 1"]),
        ({"node_rank": -1}, ["--node-rank -1"]),
        ({"nnodes": 2, "master_addr": "a"}, ["'a'", "host:port"]),
        ({"env": {"TF_CONFIG": "{"}}, ["TF_CONFIG", "not JSON"]),
    ],
)
def test_each_mistake_names_the_value_and_the_rule(
    tmp_path: Path, arguments: dict[str, Any], words: list[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError('must not start')")
    chosen: dict[str, Any] = {"workers": 1, **arguments}
    chosen["environment"] = chosen.pop("env", {})
    with pytest.raises(UserError) as error:
        start(Local, [str(script)], **chosen)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_what_starts_all_tasks_is_not_for_one_of_them(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(UserError, match="--hosts, but Slurm says already that this is worker 1"):
        start(Hosts, [str(script)], hosts="a,b", environment=srun(1))
    plan = make_plan(Asked(str(script), out=tmp_path / "compared"))
    with pytest.raises(UserError, match="spartito compare, but Open MPI says already"):
        compare_strategies(plan, env=open_mpi(0))
    assert not (tmp_path / "compared").exists()


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(UserError, match=r"Did you mean .*train\.py"):
        start(Local, [str(tmp_path / "trian.py")], environment={})
    with pytest.raises(UserError, match="spartito train mnist"):
        start(Local, ["mnist"], environment={})
    with pytest.raises(UserError, match="no_such_module"):
        start(Local, ["no_such_module.part"], module=True, environment={})


def test_a_range_of_ports_is_kept_to(tmp_path: Path) -> None:
    first = free_port()
    allowed = f"{first}-{first}"
    rows, _ = run(tmp_path, "--workers", "2", "--ports", allowed)
    for _, _, env in rows:
        assert (env["MASTER_PORT"], env["SPARTITO_PORTS"]) == (str(first), allowed)


HELD = """
import json, os
from spartito.wire.ports import free_port
from spartito.errors import UserError
found = json.loads(os.environ.get("TF_CONFIG", "{}")).get("cluster", {})
ports = [int(a.split(":")[1]) for tasks in found.values() for a in tasks]
for port in ports or [int(os.environ["MASTER_PORT"])]:
    try:
        free_port(allowed=[port])
    except UserError:
        continue
    raise SystemExit(f"another job could take {port}")
"""


@pytest.mark.parametrize("ps", [0, 1])
def test_a_jobs_ports_are_taken_before_its_tasks_listen(tmp_path: Path, ps: int) -> None:
    (tmp_path / "held.py").write_text(HELD)
    assert start(Local, [str(tmp_path / "held.py")], workers=2, ps=ps) == 0


def test_only_the_first_process_has_the_tasks_address(tmp_path: Path) -> None:
    rows, _ = run(tmp_path, "--workers", "2", TF_CONFIG=tf_config("worker", 2))
    assert [env.get("SPARTITO_ADDRESS") for _, _, env in rows] == ["b:1000", None]
