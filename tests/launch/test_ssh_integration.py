"""Jobs on several machines by a real ssh: network namespaces with a real sshd in each."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from spartito.launch.lines.network import NoNamespacesError
from tests.commands import (
    SPARTITO,
    Commands,
    Ended,
    Program,
    commands_in,
    eventually,
    running,
    tf_config,
)
from tests.launch.held import Held
from tests.launch.jobs import LISTS
from tests.launch.ssh_hosts import Site, machines, why_not
from tests.launch.supervised import SLEEPS
from tests.skips import need, skip, skip_if

pytestmark = [pytest.mark.slow, skip_if(bool(why := why_not()), "ssh", why)]

SHOWS = """
import json, os, sys
from spartito.wire.secret import read_secret
print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ), listed(read_secret())]))
"""
SHOWS = LISTS + SHOWS
SAVES = """
import os, signal, sys, time
def end(number, frame):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
"""
SAVES += SLEEPS
FAILS = """
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("the first cause")
time.sleep(300)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    need("netns")
    try:
        with machines(tmp_path_factory.mktemp("site")) as found:
            yield found
    except NoNamespacesError as error:
        skip("netns", error)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as found:
        yield found


def pids(program: Program, count: int) -> dict[str, int]:
    """The pids that the tasks print, by task."""
    found = [program.wait_for(r"\[(.*)\] pid (\d+)") for _ in range(count)]
    return {one[1]: int(one[2]) for one in found}


def keepers(program: Program) -> list[str]:
    """The command lines of the remote agents that run in the folder of ``program``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace")
            folder = (process / "cwd").readlink()
        except OSError:
            continue
        if "hosts.agent" in words and "hosts.client" not in words and folder == program.directory:
            found.append(words)
    return found


def ended(program: Program) -> Ended:
    """How it ended, once nothing of it is left on any machine."""
    got = program.end()
    assert eventually(lambda: not keepers(program))
    return got


def test_every_task_learns_who_it_is(site: Site, commands: Commands) -> None:
    commands.write("show it.py", SHOWS)
    secret = {"SPARTITO_TIMEOUT": "77", "PASSWORD": "hunter2", "SPARTITO_CLUSTER_DIR": "/x"}
    words = ["run", "--hosts", "node[1-2]", "--workers", "2", "--env", "TOKEN", "--log-dir", "logs"]
    words += ["show it.py", "it's", '"a b" $HOME']
    program = site.start(commands, *words, env={**secret, "TOKEN": "a\n'b'"})
    got = ended(program)
    assert got.code == 0, got.err
    rows = sorted(re.findall(r"^\[(.*?)\] (.*)$", got.out, re.MULTILINE))
    assert [name for name, _ in rows] == [f"worker {rank}" for rank in range(4)]
    for rank, (_, row) in enumerate(rows):
        arguments, folder, env, having = json.loads(row)
        assert having == {}  # of all processes here and there
        assert arguments == ["it's", '"a b" $HOME']
        assert folder == str(commands.directory)
        expected = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2)}
        expected |= {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "SPARTITO_TIMEOUT": "77"}
        assert expected | {"TOKEN": "a\n'b'"} == {name: env[name] for name in (*expected, "TOKEN")}
        assert (commands.directory / "logs" / f"worker-{rank}.log").read_text() == f"{row}\n"
        assert env.keys().isdisjoint({"PASSWORD", "SPARTITO_CLUSTER_DIR", "TF_CONFIG"})
    assert "node1  worker 0 (29500), worker 1 (29501)" in got.err
    assert f"what worker 0 wrote is on node1, in {commands.directory}" in got.err


def test_what_a_shell_says_as_it_starts_is_in_no_way(site: Site, commands: Commands) -> None:
    says = site.folder / "home" / ".bashrc"
    says.write_text("echo welcome\necho careful >&2\nprintf 'no end: '\n")
    commands.write("show.py", "import os; print('rank', os.environ['RANK'])")
    try:
        got = ended(site.start(commands, "run", "--hosts", "node1,node2", "show.py"))
    finally:
        says.unlink()
    assert got.code == 0, got.text
    for rank in range(2):
        assert f"[worker {rank}] no end: rank {rank}\n" in got.out
        assert f"[worker {rank}] careful\n" in got.text


def test_one_machine_is_where_we_are(site: Site, commands: Commands) -> None:
    commands.write("show.py", SHOWS)
    words = ["run", "--hosts", "near,root@node2", "--ps", "1", "--port", "29600"]
    words += ["--insecure", "show.py"]
    got = ended(site.start(commands, *words, env={"PASSWORD": "hunter2"}))
    assert got.code == 0, got.err
    assert got.err.startswith("spartito: insecure: what tasks send by near is not encrypted")
    rows = {name: json.loads(row)[2] for name, row in re.findall(r"\[(.*?)\] (.*)", got.out)}
    cluster = {"worker": ["near:29600", "node2:29600"], "ps": ["near:29601"]}
    for name, env in rows.items():
        told = json.loads(env["TF_CONFIG"])
        assert told["cluster"] == cluster
        assert f"{told['task']['type']} {told['task']['index']}" == name
        assert ("PASSWORD" in env) == (name != "worker 1")
        assert env["SPARTITO_TLS"] == "off"
    assert sorted(rows) == ["ps 0", "worker 0", "worker 1"]
    assert "wrote" not in got.err


@pytest.mark.parametrize(
    "roles",
    [
        pytest.param([], marks=pytest.mark.slow, id="synchronous"),
        pytest.param(["--ps", "1", "--evaluator"], id="ps"),
    ],
)
def test_digits_are_learned(site: Site, commands: Commands, roles: list[str]) -> None:
    recipe = ["--epochs", "1", "--batch-size", "500", "--out", "run", "--json"]
    words = ["train", "mnist", "--hosts", "node1,node2", *roles, *recipe]
    program = site.start(commands, *words, env={"SPARTITO_TIMEOUT": "60"})
    got = ended(program)
    assert got.code == 0, got.text
    result = json.loads(got.out.splitlines()[-1])
    assert (commands.directory / result["model"]).exists()
    evaluated = (commands.directory / "run" / "evaluations.jsonl").exists()
    assert evaluated == ("--evaluator" in roles)


def test_a_killed_worker_ends_the_job(site: Site, commands: Commands) -> None:
    commands.write("sleep.py", SLEEPS)
    program = site.start(commands, "run", "--hosts", "node1,node2", "sleep.py")
    os.kill(pids(program, 2)["worker 1"], signal.SIGKILL)
    got = ended(program)
    assert got.code == 69
    assert "worker 0 was stopped because worker 1 was killed by SIGKILL" in got.err


def test_a_lost_connection_ends_the_job(site: Site, commands: Commands) -> None:
    commands.write("sleep.py", SLEEPS)
    program = site.start(commands, "run", "--hosts", "near,node2", "sleep.py")
    pids(program, 2)
    (ssh,) = ssh_of(program)
    os.kill(ssh, signal.SIGKILL)
    got = ended(program)
    assert got.code == 69
    assert "[worker 1] spartito: the connection to node2 is lost" in got.err


def ssh_of(program: Program) -> list[int]:
    """The ssh processes of ``program``."""
    found = []
    for pid in running(program.mark):
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ssh\0"):
                found.append(pid)
    return found


def test_a_signal_while_the_machines_are_asked(site: Site, commands: Commands) -> None:
    commands.write("never.py", "print('it ran')")
    script = '#!/bin/sh\n[ "$1" = -G ] || { echo asked >&2; exec sleep 300; }\n'
    slow = commands.write("slow-ssh", script)
    slow.chmod(0o755)
    words = ["run", "--ssh", str(slow), "--hosts", "node1,node2", "never.py"]
    program = commands.start(*site.near.enters, *SPARTITO, *words)
    assert eventually(lambda: len(sleepers(program)) == 2)
    program.send(signal.SIGINT)
    assert ended(program).code == 130


def sleepers(program: Program) -> list[int]:
    """The processes that stand for a machine which does not reply."""
    found = []
    for pid in running(program.mark):
        with suppress(OSError):  # it ended meanwhile
            if Path(f"/proc/{pid}/comm").read_text() == "sleep\n":
                found.append(pid)
    return found


def test_a_killed_server_comes_back(site: Site, commands: Commands) -> None:
    """A task that may be started again is, on its own machine."""
    once = commands.directory / "once"
    script = f"""
import os, pathlib, signal, time
once, done = pathlib.Path({str(once)!r}), pathlib.Path({str(once)!r} + "-done")
if '"type": "ps"' in os.environ["TF_CONFIG"]:
    if not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    done.touch()
while not done.exists():
    time.sleep(0.05)
"""
    commands.write("job.py", script)
    words = ["run", "--hosts", "node1,node2", "--ps", "2", "job.py"]
    got = ended(site.start(commands, *words))
    assert got.code == 0, got.err
    assert re.search(r"ps [01] was killed by SIGKILL; it is started again \(1 of 3\)", got.err)


def test_the_first_cause_is_shown(site: Site, commands: Commands) -> None:
    commands.write("fail.py", FAILS)
    got = ended(site.start(commands, "run", "--hosts", "node1,node2", "fail.py"))
    assert got.code == 1
    assert got.err.count("Traceback") == 1
    assert "worker 0 was stopped because worker 1 failed with exit code 1" in got.err
    assert "ValueError: the first cause" in got.err


def test_an_exit_code_that_is_ssh_own(site: Site, commands: Commands) -> None:
    commands.write("exit.py", "import sys; sys.exit(255)")
    assert ended(site.start(commands, "run", "--hosts", "node1", "exit.py")).code == 1


@pytest.mark.parametrize(
    ("hosts", "number", "code"),
    [("near,node2", signal.SIGINT, 130), ("node1", signal.SIGTERM, 143)],
)
def test_a_signal_ends_all_machines(
    site: Site, commands: Commands, hosts: str, number: signal.Signals, code: int
) -> None:
    commands.write("save.py", SAVES)
    program = site.start(commands, "run", "--hosts", hosts, "save.py")
    for _ in hosts.split(","):
        program.wait_for("pid")
    program.send(number)
    got = ended(program)
    assert got.code == code
    assert got.out.count("saved") == len(hosts.split(","))


def test_nothing_outlives_a_killed_launcher(site: Site, commands: Commands) -> None:
    commands.write("sleep.py", SLEEPS)
    program = site.start(commands, "run", "--hosts", "near,node[1-2]", "--workers", "1", "sleep.py")
    assert len(pids(program, 3)) == 3
    assert len(keepers(program)) >= 2
    program.send(signal.SIGKILL)
    assert ended(program).code == -signal.SIGKILL


UNREACHABLE = {
    "nobodys-key": ["ssh to nobodys-key: it does not let us in", "ssh-copy-id nobodys-key"],
    "unknown-key": ["its host key is not known here", "unknown-key true"],
    "changed-key": ["another host key than before", "ssh-keygen -R changed-key"],
    "gone": ["ssh to gone: ", "10.77.0.99"],
    "nowhere.invalid": ["its name is not known here"],
}


def test_machines_that_cannot_be_reached(site: Site, commands: Commands) -> None:
    commands.write("never.py", "print('it ran')")
    got = ended(
        site.start(commands, "run", "--hosts", ",".join(["node2", *UNREACHABLE]), "never.py")
    )
    assert got.code == 2, got.text
    assert "5 of 6 machines cannot take part" in got.err
    assert all(word in got.err for words in UNREACHABLE.values() for word in words), got.err
    assert "Traceback" not in got.err
    assert "it ran" not in got.text


@pytest.mark.parametrize(
    ("hosts", "told"),
    [
        ("node2,alias", "node2 and alias are both node2\n  Name each machine once"),
        ("node2,loopback", "127.0.0.1 is each machine itself"),
        ("node2,no-server", "ssh to no-server: nobody listens on its ssh port (ssh: connect to"),
        ("node[2-", "does not parse"),
    ],
)
def test_a_list_of_machines_that_cannot_be(
    site: Site, commands: Commands, hosts: str, told: str
) -> None:
    commands.write("never.py", "print('it ran')")
    got = ended(site.start(commands, "run", "--hosts", hosts, "never.py"))
    assert (got.code, told in got.err, "it ran" in got.text) == (2, True, False), got.text


@pytest.mark.timeout(240)
def test_the_machine_of_rank_0_is_lost_and_the_other_goes_on(
    site: Site, commands: Commands, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ["--strategy", "multi_worker_mirrored", "--workers", "2", "--epochs", "6"]
    words += ["--recover", "--min-workers", "2", "--wait", "0.5", "--out", str(out)]
    held = Held(tmp_path / "held", 250)  # two epochs
    job = site.start(commands, "train", "mnist", "--hosts", "node1,node2", *words, env=held.env)
    held.wait(250, *(f"worker-{rank}" for rank in range(4)))
    try:
        site.one.cut()
        held.let_go(250)
        job.wait_for(r"goes on after .*: worker 2, worker 3")
        got = ended(job)
    finally:
        site.one.join()
    assert got.code == 0, got.text
    rows = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == list(range(1, 7))


def test_a_machine_where_something_is_missing(site: Site, commands: Commands) -> None:
    commands.write("never.py", "print('it ran')")
    bare = commands.write("bare", '#!/bin/sh\nexec /usr/bin/env -i python3 -S -I "$@"\n')
    bare.chmod(0o755)
    one = ("--hosts", "node1")
    for words, told in (
        (["--remote-python", "/no/python"], "node1 has no Python at /no/python"),
        (["--remote-dir", "/no/folder"], "node1 has no folder /no/folder"),
        (["--remote-python", "/bin/true"], "node1 printed what cannot be read"),
        (["--remote-python", bare], f"{bare} on node1 has no Spartito"),
        (["--remote-dir", "/"], "on node1 there is no script 'never.py'"),
    ):
        got = ended(site.start(commands, "run", *one, *words, "never.py"))
        assert got.code == 2, got.text
        assert told in got.err
        assert "it ran" not in got.text
    got = ended(site.start(commands, "run", *one, "-m", "no_such_module"))
    assert (got.code, "no module named 'no_such_module'" in got.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--strategy", "parameter_server"], "Add one by --ps 1"),
        (["--port", "65535", "--ps", "2"], "'65536'"),
    ],
)
def test_words_that_do_not_go_together(
    site: Site, commands: Commands, words: list[str], told: str
) -> None:
    commands.write("never.py", "print('it ran')")
    got = ended(site.start(commands, "run", "--hosts", "node1,node2", *words, "never.py"))
    assert got.code == 2
    assert told in got.err, got.err
    assert "Traceback" not in got.err
    assert "it ran" not in got.text


def test_a_cluster_that_is_told_already(site: Site, commands: Commands) -> None:
    commands.write("never.py", "print('it ran')")
    env = tf_config({"worker": ["a:1", "b:1"]}, "worker", 1)
    got = ended(site.start(commands, "run", "--hosts", "near", "never.py", env=env))
    assert (got.code, "--hosts, but TF_CONFIG says already" in got.err) == (2, True)


def test_the_doctor_of_all_machines(site: Site, commands: Commands) -> None:
    words = ["--workers", "2", "--ps", "1", "--timeout", "60"]
    got = ended(site.start(commands, "doctor", "--hosts", "near,node2", *words, "--json"))
    assert got.code == 0, got.text
    found = json.loads(got.out)
    assert found["missing"] == []
    assert found["addresses"]["ps 0"] == "near:29502"
    names = {task: facts["network"] for task, facts in found["facts"].items()}
    assert len({names[task] for task in ("worker 0", "worker 1", "ps 0")}) == 1
    assert names["worker 2"] == names["worker 3"] != names["worker 0"]
    assert re.search(
        r"near +worker 0 \(29500\), worker 1.*, ps 0 \(29502\)$", got.err, re.MULTILINE
    )


def test_the_doctor_finds_a_way_that_is_closed(site: Site, commands: Commands) -> None:
    closed = 29700  # no other test uses it
    site.one.drop(site.two, closed)
    words = ["--workers", "1", "--port", str(closed), "--timeout", "5"]
    got = ended(site.start(commands, "doctor", "--hosts", "node1,node2", *words))
    assert got.code == 69, got.text
    assert "missing: worker 1 did not come" in got.out
    assert "[worker" not in got.text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--hosts", "node1,gone"], "ssh to gone"),
        (["--hosts", "node1", "--compose", "x.yaml"], "--hosts and --compose exclude each other"),
    ],
)
def test_the_doctor_needs_its_machines(
    site: Site, commands: Commands, words: list[str], told: str
) -> None:
    got = ended(site.start(commands, "doctor", *words))
    assert got.code == 2
    assert told in got.err
