from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spartito.cluster import resolve
from spartito.errors import UserError
from spartito.launch.hosts import agent, client
from spartito.launch.hosts.check import ask_hosts, notes
from spartito.launch.hosts.facts import Facts, Question, facts, parse
from spartito.launch.hosts.names import Host, check_names, parse_hosts
from spartito.launch.hosts.plan import MEMBERSHIP, Plan, check_passed, travelling
from spartito.launch.hosts.ssh import MOST, Reply, Ssh, address_of, ask_all, parse_ssh, refusal
from spartito.launch.processes.roles import Roles
from spartito.wire.interfaces import is_here

SSH = Ssh(("ssh", "-F", "my config"), "/home/me/job", "/opt/python")
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
NAMES = st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True)
PLANS = st.builds(
    lambda here, each, ps, evaluator, chief: Plan(
        tuple(Host(f"h{index}", f"h{index}", own) for index, own in enumerate(here)),
        tuple(4 * (index + 1) for index in range(len(here))),
        Roles(each * len(here), ps, evaluator, chief),
        ("train.py", "--name=it's"),
        SSH,
    ),
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)


def test_a_list_of_machines() -> None:
    assert parse_hosts("a") == ("a",)
    assert parse_hosts("a,me@b.example.org,10.0.0.3,fe80::1") == (
        *("a", "me@b.example.org", "10.0.0.3", "fe80::1"),
    )
    assert parse_hosts("node[01-03],gpu_1") == ("node01", "node02", "node03", "gpu_1")
    assert parse_hosts("localhost") == ("localhost",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["''", "does not parse"]),
        ("a,,b", ["'a,,b'", "',b'"]),
        ("node[3-1]", ["3-1", "backwards"]),
        ("a,b:22", ["'b:22' is no name", "ssh's own config"]),
        ("a,-oProxyCommand=x", ["'-oProxyCommand=x' is no name"]),
        ("a,me@", ["'me@' is no name"]),
        ("a,-me@b", ["'-me@b' is no name"]),
        ("a,b,A", ["names A twice"]),
        ("a,me@a", ["names a twice"]),
        ("fe80::1,FE80:0::1", ["names FE80:0::1 twice"]),
        ("a,localhost", ["localhost is each machine itself"]),
        ("127.0.0.2,127.0.0.3", ["127.0.0.2 is each machine itself"]),
    ],
)
def test_a_list_that_is_none(text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        parse_hosts(text)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_which_machine_is_this_one() -> None:
    assert is_here("localhost")
    assert not is_here("192.0.2.1")
    assert not is_here("no-such-name.invalid")


@given(PLANS)
def test_each_task_learns_who_it_is_and_where(plan: Plan) -> None:
    tasks = plan.roles.tasks
    specs = [resolve(plan.environment(task, {})) for task in tasks]
    assert [spec.task for spec in specs] == list(tasks)
    workers = [plan.machine_of(task) for task in tasks if task.type == "worker"]
    assert workers == sorted(workers)
    assert {workers.count(index) for index in range(len(plan.hosts))} == {plan.workers}
    firsts = {task.type: plan.machine_of(task) for task in tasks if task.type[0] in "ce"}
    assert set(firsts.values()) <= {0}
    addresses = [plan.address(task) for task in tasks]
    assert len(set(addresses)) == len(addresses)
    for task, spec in zip(tasks, specs, strict=True):
        if task.type == "worker" and not plan.roles.chief:
            assert spec.local_rank == task.index % plan.workers
            assert spec.local_size == plan.workers
        assert len(plan.hosts) == 1 or (spec.rendezvous or "").startswith("h0:295")
        if plan.roles.asked:
            assert spec.address_of(task) == plan.address(task)
            assert plan.address(task).startswith(plan.hosts[plan.machine_of(task)].address)


@given(PLANS)
def test_cores_are_those_of_each_machine(plan: Plan) -> None:
    for task in plan.roles.tasks:
        share = plan.cores[plan.machine_of(task)] // plan.workers if task.type == "worker" else 1
        assert plan.environment(task, {})["OMP_NUM_THREADS"] == str(max(1, share))
        assert plan.environment(task, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


@given(PLANS)
def test_only_what_is_elsewhere_needs_ssh(plan: Plan) -> None:
    secret = {"SPARTITO_SECRET": "known to the tasks alone"}
    env = {"SPARTITO_TIMEOUT": "9", "PASSWORD": "hunter2", "PATH": "/bin"} | secret
    for task in plan.roles.tasks:
        host = plan.hosts[plan.machine_of(task)]
        process = plan.process(task, env)
        assert process.name == str(task)
        if host.here:
            assert process.argv == [sys.executable, "train.py", "--name=it's"]
            assert env.items() <= process.env.items()
            continue
        told = json.loads(process.env[client.FIRST_LINE])
        assert told == plan.environment(task, {"SPARTITO_TIMEOUT": "9"})
        assert process.env.items() - env.items() == {
            (client.FIRST_LINE, process.env[client.FIRST_LINE])
        }
        assert process.argv[3:8] == [host.name, "0", *SSH.words]
        assert process.argv[-2] == host.name
        (script,) = shlex.split(process.argv[-1])[3:]
        assert script.startswith("cd /home/me/job")
        words = shlex.split(script.split("exec ", 1)[1])
        assert words == agent.command(["/opt/python", "train.py", "--name=it's"], "/opt/python")
        assert "=" not in " ".join(words[:4])


def test_many_tasks_of_a_machine_do_not_connect_all_at_once() -> None:
    plan = Plan((Host("a", "a"), Host("b", "b")), (1, 1), Roles(40), ("x.py",), SSH)
    waits = [plan.process(task, {}).argv[4] for task in plan.roles.tasks]
    assert waits == 2 * (8 * ["0"] + 8 * ["1"] + 4 * ["2"])


def test_where_the_tasks_are_is_told() -> None:
    hosts = (Host("me@a", "a"), Host("bcd", "bcd"))
    assert Plan(hosts, (1, 1), Roles(2, ps=2, evaluator=True), (), SSH).lines() == [
        "me@a  worker 0 (29500), ps 0 (29501), evaluator 0",
        "bcd   worker 1, ps 1 (29501)",
    ]
    assert Plan(hosts, (1, 1), Roles(4), (), SSH, 29600).lines() == [
        "me@a  worker 0 (29600), worker 1 (29601)",
        "bcd   worker 2 (29600), worker 3 (29601)",
    ]


def test_a_range_of_ports_must_do_for_all_tasks_of_a_machine() -> None:
    plan = Plan((Host("a", "a"), Host("b", "b")), (1, 1), Roles(4), (), SSH, 29600)
    plan.check_ports(range(29600, 29602))
    with pytest.raises(UserError, match="listen at ports 29600-29601, but only 29600-29600 are"):
        plan.check_ports(range(29600, 29601))


@given(st.dictionaries(NAMES, WORDS))
@pytest.mark.slow
def test_only_our_own_settings_travel(env: dict[str, str]) -> None:
    ours = {"SPARTITO_TIMEOUT": "5", "OMP_NUM_THREADS": "2", "TORCH_CPP_LOG_LEVEL": "INFO"}
    assert travelling(env | dict.fromkeys(MEMBERSHIP, "x") | ours) == ours


@settings(max_examples=60)
@given(st.lists(WORDS, max_size=4), st.sampled_from(["plain", "it's", 'a "b" $HOME `c`', "-d"]))
def test_words_arrive_as_they_were(words: list[str], folder: str) -> None:
    with tempfile.TemporaryDirectory() as parent:
        (Path(parent) / folder).mkdir()
        ssh = Ssh(("ssh",), f"{parent}/{folder}", "printf")
        script = ssh.python_command("b", ["printf", "%s\\0", "first", *words])[-1]
        got = subprocess.run(["sh", "-c", script], capture_output=True, timeout=30, check=True)
    assert got.stdout.decode().split("\0") == ["first", *words, ""]


def test_a_variable_of_the_users_travels_by_its_name() -> None:
    env = {"TOKEN": "hunter2", "OTHER": "x"}
    check_passed(["TOKEN"], env)
    assert travelling(env, ("TOKEN",)) == {"TOKEN": "hunter2"}
    for names, words in (
        (["TOKEN=hunter2"], ["--env TOKEN=...", "--env TOKEN"]),
        (["NONE"], ["--env NONE", "is set here"]),
        (["TF_CONFIG"], ["--env TF_CONFIG", "who is in the job"]),
    ):
        with pytest.raises(UserError) as error:
            check_passed(names, env)
        assert all(word in str(error.value) for word in words)
        assert "hunter2" not in str(error.value)
    plan = Plan((Host("a", "a"),), (1,), Roles(1), ("x.py",), SSH, passed=("TOKEN",))
    with pytest.raises(UserError, match="the environment for worker 0 has"):
        plan.process(plan.roles.tasks[0], {"TOKEN": "x" * client.MOST_BYTES})


def test_a_folder_below_the_home_there() -> None:
    for folder, words in (("~", "cd ~ "), ("~/a b", "cd ~/'a b' "), ("a", "cd a ")):
        script = shlex.split(Ssh(("ssh",), folder, "python").python_command("b", ["python"])[-1])
        assert script[3].startswith(words)


def test_a_python_below_the_home_there(tmp_path: Path) -> None:
    python = tmp_path / "my env" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    ssh = Ssh(("ssh",), "~/my env", "~/my env/python")
    show = ["-c", "import os, sys; print(os.getcwd(), sys.argv[1])", "~/as it is"]
    argv = agent.command([ssh.python, *show], ssh.python)
    script = ssh.python_command("b", argv)[-1]
    home = os.environ | {"HOME": str(tmp_path)}
    words, pipe = ["sh", "-c", script], subprocess.PIPE
    with subprocess.Popen(words, env=home, text=True, stdin=pipe, stdout=pipe) as there:
        assert there.stdin is not None
        assert there.stdout is not None
        there.stdin.write(agent.first_line(home))
        there.stdin.flush()
        assert there.stdout.read() == f"{python.parent} ~/as it is\n"


def test_a_command_that_is_too_long() -> None:
    with pytest.raises(UserError, match=f"the command for b has .* more than {MOST}"):
        SSH.python_command("b", ["python", "x" * MOST])


@pytest.mark.parametrize(
    ("words", "rule"),
    [("", "is empty"), ("ssh 'x", "cannot be read"), ("no-such-ssh", "cannot be started")],
)
def test_a_command_that_is_no_ssh(words: str, rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        address_of(parse_ssh(words), "b")


def refused(code: int | None, err: str = "") -> str:
    found = refusal("b", SSH, Reply(code, "", err))
    assert found is not None
    return "\n".join(found)


def test_what_is_wrong_with_a_machine() -> None:
    assert "b did not reply within 30 s" in refused(None)
    assert "no folder /home/me/job" in refused(81)
    assert "no Python at /opt/python" in refused(82)
    assert "no Spartito, or another version" in refused(1, "x: No module named 'spartito'")
    assert "ssh to b failed with exit code 3: last" in refused(3, "first\nlast\n\n")
    timed_out = refused(255, "ssh: connect to host b port 22: Connection timed out\n")
    assert "it does not reply" in timed_out
    denied = refused(255, "me@b: Permission denied (publickey,password).")
    assert "ssh-copy-id b" in denied
    assert "ssh -F 'my config' b true" in denied
    assert refusal("b", SSH, Reply(0, "", "a banner: permission denied to rabbits")) is None


def test_a_machine_that_does_not_reply_is_left() -> None:
    slow = [sys.executable, "-S", "-c", "import time; time.sleep(300)"]
    quick = [sys.executable, "-S", "-c", "print('here')"]
    replies = ask_all({"a": slow, "b": quick}, limit=3.0)
    assert replies == [Reply(None), Reply(0, "here\n", "")]


def test_what_this_machine_says_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    question = Question("train.py", False, ("localhost", "no-such-name.invalid"))
    told = facts(question)
    assert "there is no script 'train.py'" in told.missing
    assert told.cores >= 1
    assert told.names["localhost"]
    assert told.names["no-such-name.invalid"] == []
    (tmp_path / "train.py").touch()
    assert facts(question).missing == ""
    assert parse("Welcome!\n") is None


def test_all_machines_that_cannot_take_part_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ssh = Ssh(("no-such-ssh",), str(tmp_path), sys.executable)
    hosts = [Host("here", "localhost", True), Host("there", "localhost", True)]
    with pytest.raises(UserError) as error:
        ask_hosts(hosts, ssh, Question("train.py", False, ()))
    assert "2 of 2 machines cannot take part" in str(error.value)
    assert "on there there is no script" in str(error.value)


def test_names_that_mean_nothing_or_oneself() -> None:
    hosts = [Host("a", "a"), Host("b", "b")]
    check_names(hosts, [{"a": ["10.0.0.1"]}, {"a": ["10.0.0.1"]}])
    with pytest.raises(UserError, match="b does not know the name a"):
        check_names(hosts, [{"a": ["10.0.0.1"]}, {"a": []}])
    check_names(hosts, [{"a": ["127.0.1.1"]}, {"a": ["10.0.0.1"]}])  # as Debian has it
    with pytest.raises(UserError, match="on b the name a means 127") as error:
        check_names(hosts, [{"a": ["10.0.0.1"]}, {"a": ["127.0.1.1"]}])
    assert "Write 10.0.0.1 instead of a" in str(error.value)


def test_what_is_worth_a_line() -> None:
    def told(**other: Any) -> Facts:
        usual: dict[str, Any] = {"python": "3.11.2", "torch": "2.13.0", "cores": 1}
        return Facts(spartito="1", gpus=0, missing="", names={}, **(usual | other))

    hosts = [Host("a", "a"), Host("b", "b")]
    assert notes(hosts, [told(), told()], 1) == []
    assert notes(hosts, [told(), told(cores=2)], 2) == ["2 workers share 1 cores of a"]
    assert notes(hosts, [told(), told(python="3.12.1", torch="2.12.0")], 1) == [
        "b has Python 3.12.1, a has 3.11.2",
        "b has torch 2.12.0, a has 2.13.0",
    ]
