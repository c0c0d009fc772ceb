from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from spartito.cluster import ClusterSpec, Task
from spartito.cluster.file import from_file
from spartito.errors import UserError

YAML = """\
# our two computers
worker: [a:29500, b:29500]
ps:
  - "[fe80::1]:29500"
"""


def written(folder: Path, text: str) -> dict[str, str]:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return {"SPARTITO_CLUSTER": str(path)}


def test_the_file_lists_all_and_a_variable_says_who_we_are(tmp_path: Path) -> None:
    env = written(tmp_path, YAML)
    for text in ("worker 1", "worker:1"):
        assert from_file(env | {"SPARTITO_TASK": text}) == ClusterSpec(
            addresses={"worker": ("a:29500", "b:29500"), "ps": ("[fe80::1]:29500",)},
            task=Task("worker", 1),
            rank=1,
            world_size=2,
            local_rank=0,
            local_size=1,
            rendezvous="a:29500",
            source=env["SPARTITO_CLUSTER"],
        )


def test_json_is_read_as_well(tmp_path: Path) -> None:
    env = written(tmp_path, json.dumps({"chief": ["a:1"], "worker": ["b:1"]}, indent=4))
    spec = from_file(env, is_ours={"b"}.__contains__)
    assert spec is not None
    assert str(spec.task) == "worker 0"
    assert spec.rank == 1


def test_we_are_the_task_on_our_host(tmp_path: Path) -> None:
    env = written(tmp_path, YAML)
    for host, task in (("b", "worker 1"), ("fe80::1", "ps 0")):
        spec = from_file(env, is_ours={host}.__contains__)
        assert spec is not None
        assert str(spec.task) == task


def test_this_machine_knows_its_name(tmp_path: Path) -> None:
    name = socket.gethostname()
    spec = from_file(written(tmp_path, f"worker: ['192.0.2.1:1', '{name.upper()}:1']"))
    assert spec is not None
    assert spec.rank == 1


def test_without_the_variable_it_says_nothing() -> None:
    assert from_file({"SPARTITO_TASK": "worker 0"}) is None


@pytest.mark.parametrize(
    ("text", "task", "words"),
    [
        ("{", "worker 0", ["neither YAML nor JSON"]),
        ("\x00", "worker 0", ["neither YAML nor JSON"]),
        ("", "worker 0", ["must map roles", "None"]),
        ("[a:1]", "worker 0", ["must map roles"]),
        ("worker: 'a:1'", "worker 0", ["list", "'a:1'"]),
        ("worker: [1]", "worker 0", ["list", "[1]"]),
        ("wroker: [a:1]", "worker 0", ["'wroker'", "'worker'"]),
        ("1: [a:1]", "worker 0", ["1 is not a role"]),
        ("ps: [a:1]", "ps 0", ["no chief and no worker"]),
        ("worker: [a:1, a:1]", "worker 0", ["one address", "a:1"]),
        ("worker: [a:1, A.:1]", "worker 0", ["have one address, a:1, which is A.:1"]),
        ("worker: ['localhost:1', '127.0.0.1:1']", "worker 0", ["localhost:1, which is 127.0.0.1"]),
        ("worker: ['[fe80::1]:1', '[FE80:0::1]:1']", "worker 0", ["have one address"]),
        ("worker: [a]", "worker 0", ["worker 0", "'a'", "host:port"]),
        ("worker: ['a:99999']", "worker 0", ["'99999'", "65535"]),
        ("{worker: [a:1], ps: [A:1]}", "worker 0", ["worker 0 and ps 0"]),
        ("{worker: [b:1], ps: ['[::1]:1']}", "worker 0", ["[::1]:1", "b:1"]),
        ("worker: ['b:1', '127.0.0.1:1']", "worker 0", ["127.0.0.1:1", "b:1"]),
        ("worker: [localhost:1, b:1]", "worker 0", ["localhost:1 beside worker 1 at b:1"]),
        ("worker: [a:1]", "worker 1", ["worker 1", "1 worker"]),
        ("worker: [a:1]", "ps 0", ["ps 0", "1 worker"]),
        ("worker: [a:1]", "boss 0", ["SPARTITO_TASK", "'boss'"]),
        ("worker: [a:1]", "worker", ["has no number", "'worker 0'"]),
        ("worker: [a:1]", "worker x", ["has no number"]),
        ("worker: [a:1]", "", ["no task is on this machine (", "SPARTITO_TASK"]),
        ("worker: [h:1, h:2]", "", ["worker 0 and worker 1", "SPARTITO_TASK"]),
    ],
)
def test_each_mistake_is_named(tmp_path: Path, text: str, task: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        from_file(written(tmp_path, text) | {"SPARTITO_TASK": task}, is_ours={"h"}.__contains__)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        from_file({"SPARTITO_CLUSTER": str(tmp_path / "none.yaml")})
