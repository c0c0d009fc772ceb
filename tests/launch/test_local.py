from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.cluster import resolve
from spartito.errors import UserError
from spartito.launch import launch
from spartito.launch.local import MALLOC, Place, environments

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
        tmp_path, "--workers", "3", "--strategy", "mirrored", "--strategy-options", '{"a": 1}'
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
            "SPARTITO_STRATEGY": "mirrored",
            "SPARTITO_STRATEGY_OPTIONS": '{"a": 1}',
            "PYTHONUNBUFFERED": "1",
            **MALLOC,
        }
        assert expected.items() <= env.items()
        assert int(env["OMP_NUM_THREADS"]) >= 1
        spec = resolve(env)
        assert (spec.rank, spec.num_replicas, spec.local_size) == (rank, 3, 3)
    assert len({row[2]["MASTER_PORT"] for row in rows}) == 1


def test_one_process_without_a_strategy_is_alone(tmp_path: Path) -> None:
    ((_, _, env),), _ = run(tmp_path, "--workers", "1")
    assert resolve(env).num_replicas == 1
    assert "SPARTITO_STRATEGY" not in env


def test_what_the_user_set_stays(tmp_path: Path) -> None:
    given_ = {"OMP_NUM_THREADS": "7", "MALLOC_TRIM_THRESHOLD_": "1", "SPARTITO_RUN_DIR": "x"}
    rows, _ = run(tmp_path, "--workers", "2", **given_)
    assert all(given_.items() <= env.items() for _, _, env in rows)


def test_several_machines_by_hand(tmp_path: Path) -> None:
    options = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1:29500"]
    rows, _ = run(tmp_path, "--workers", "2", *options, TF_CONFIG=tf_config("worker", 0))
    assert [row[0] for row in rows] == ["worker 2", "worker 3"]
    for local, (_, _, env) in enumerate(rows):
        spec = resolve(env)
        assert (spec.rank, spec.num_replicas) == (2 + local, 4)
        assert (spec.local_rank, spec.local_size) == (local, 2)
        assert spec.rendezvous == "10.0.0.1:29500"
        assert env["GROUP_RANK"] == "1"


def test_several_processes_of_one_tf_config_task(tmp_path: Path) -> None:
    rows, _ = run(tmp_path, "--workers", "2", TF_CONFIG=tf_config("worker", 1))
    assert [row[0] for row in rows] == ["worker 2", "worker 3"]
    for local, (_, _, env) in enumerate(rows):
        spec = resolve(env)
        assert "TF_CONFIG" not in env
        assert (spec.rank, spec.num_replicas) == (2 + local, 6)
        assert (spec.local_rank, spec.local_size) == (2 + local, 4)  # another task is on host a
        assert spec.rendezvous == "a:1000"


def test_one_process_is_the_tf_config_task_itself(tmp_path: Path) -> None:
    ((_, _, env),), _ = run(tmp_path, "--workers", "1", TF_CONFIG=tf_config("worker", 1))
    spec = resolve(env)
    assert spec.name_of(1) == "worker 1 (a:2000)"
    by_torchruns_names = resolve({k: v for k, v in env.items() if k != "TF_CONFIG"})
    for one in (spec, by_torchruns_names):
        assert (one.rank, one.num_replicas, one.local_rank, one.local_size) == (1, 3, 1, 2)


def test_an_evaluator_is_one_process_without_a_rank(tmp_path: Path) -> None:
    ((_, _, env),), _ = run(tmp_path, "--workers", "2", TF_CONFIG=tf_config("evaluator", 0))
    assert "RANK" not in env
    assert str(resolve(env).task) == "evaluator 0"


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
        for env in environments({}, Place(node, nodes, "a", 1), workers, cores):
            assert env["OMP_NUM_THREADS"] == str(max(1, cores // workers))
            specs.append(resolve(env))
    assert [spec.rank for spec in specs] == list(range(nodes * workers))
    assert {spec.num_replicas for spec in specs} == {nodes * workers}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"strategy": "mirored"}, ["'mirored'", "'mirrored'"]),
        ({"strategy": "one_device", "workers": 2}, ["one_device", "2", "mirrored"]),
        ({"strategy": "one_device", "nnodes": 2, "master_addr": "a:1"}, ["one_device", "2"]),
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
    chosen: dict[str, Any] = {"workers": 1, "env": {}, **arguments}
    with pytest.raises(UserError) as error:
        launch([str(script)], **chosen)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(UserError, match=r"Did you mean .*train\.py"):
        launch([str(tmp_path / "trian.py")], env={})
    with pytest.raises(UserError, match="spartito train mnist"):
        launch(["mnist"], env={})
    with pytest.raises(UserError, match="no_such_module"):
        launch(["no_such_module.part"], module=True, env={})
