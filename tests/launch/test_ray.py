"""Jobs on a real Ray cluster: two nodes of this machine, each started by ``ray start``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from spartito.errors import UserError
from spartito.launch.on_ray.actor import Node, check_runnable, checksum_of, versions
from spartito.launch.on_ray.job import check_nodes
from spartito.launch.on_ray.session import check_fits
from spartito.wire.ports import free_port
from tests.skips import need, skip

LIMIT = 120.0

TRAIN = """
import sys, torch, spartito as sp
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)).double()
x = torch.randn(96, 8, dtype=torch.float64)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loss = torch.nn.CrossEntropyLoss()
strategy = sp.strategy()
trainer = sp.Trainer(net, optimizer=optimizer, loss=loss, strategy=strategy)
trainer.fit(sp.data.arrays(x, (x.sum(1) > 0).long()).batch(32), epochs=2)
if strategy.task.index == 0:
    torch.save(net.state_dict(), sys.argv[1])
"""

WAITS = """
import json, os, time
config = json.loads(os.environ["TF_CONFIG"])
try:
    print(config["task"]["index"], "pid", os.getpid(), flush=True)
    time.sleep(100)
except KeyboardInterrupt:
    print("heard", flush=True)
    raise
"""

ENDS = """
import json, os, sys, time
if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
    sys.exit(7)
time.sleep(100)
"""

PROGRAM = """
import json, os, sys, threading
import ray
import spartito as sp

def who(greeting):
    from spartito.cluster import resolve
    return greeting, str(resolve(os.environ).task), os.getpid()

def fails():
    import time
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
        raise KeyError("in one task")
    time.sleep(100)

ray.init(sys.argv[1], logging_level=40)
greeting, task, pid = sp.launch.ray(who, workers=1, ps=1, args=("hello",), chief=True)
assert (greeting, task) == ("hello", "chief 0") and pid != os.getpid()
try:
    sp.launch.ray(fails, workers=2)
except KeyError as error:
    assert "in fails" in str(error.__cause__), error.__cause__
    assert "worker 1" in error.__notes__[0]
lock = threading.Lock()
try:
    sp.launch.ray(lambda: lock.locked(), workers=2)
except sp.UserError as error:
    assert "'lock' in '<lambda>' cannot be sent" in str(error)
try:
    sp.launch.ray(who, address="127.0.0.1:1")
except sp.UserError as error:
    assert "connected to Ray already" in str(error)
assert ray.is_initialized()
groups = ray.util.placement_group_table().values()
print("kept", len([group for group in groups if group["state"] != "REMOVED"]))
"""

OTHER_VERSION = """
import sys, ray
ray.__version__ = "2.1.0"
from spartito.cli import main
sys.exit(main(sys.argv[1:]))
"""


@dataclass
class Cluster:
    """A cluster and how its commands are called."""

    address: str
    directory: Path
    env: dict[str, str]
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "spartito", "run", "--ray", self.address, *words]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words), cwd=self.directory, env=self.env, capture_output=True,
            text=True, timeout=LIMIT,
        )  # fmt: skip

    def python(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words], cwd=self.directory, env=self.env, capture_output=True,
            text=True, timeout=LIMIT,
        )  # fmt: skip

    def script(self, text: str) -> str:
        path = self.directory / f"script{abs(hash(text))}.py"
        path.write_text(text)
        return str(path)

    def waiting(self, *words: str) -> tuple[subprocess.Popen[str], list[int]]:
        """A job whose two tasks wait, and their process ids."""
        job = subprocess.Popen(
            self.command("--workers", "2", *words, self.script(WAITS)), cwd=self.directory,
            env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert job.stdout is not None
        pids: list[int] = []
        while len(pids) < 2:
            line = job.stdout.readline()
            assert line, "the job ended"
            pids += [int(found) for found in re.findall(r"pid (\d+)", line)]
        return job, pids

    def start(self, *words: str) -> None:
        """One more node."""
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        usual = ["--num-cpus=2", "--object-store-memory=100000000", "--disable-usage-stats"]
        with (self.directory / f"node{len(self.nodes)}.log").open("wb") as log:
            node = subprocess.Popen(
                [*ray, *usual, *words], env=self.env, stdout=log, stderr=log, start_new_session=True
            )
        self.nodes.append(node)

    def nodes_alive(self) -> int:
        code = (
            "import sys, ray; ray.init(sys.argv[1], logging_level=50, log_to_driver=False); "
            "print(sum(n['Alive'] for n in ray.nodes()))"
        )
        found = self.python("-c", code, self.address).stdout.strip()
        return int(found or 0)

    def end(self, node: subprocess.Popen[bytes]) -> None:
        """End a node, with all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    need("ray")
    try:
        import ray
    except ImportError as error:
        skip("ray", error)
    host, port = ray.util.get_node_ip_address(), free_port()
    env = {**os.environ, "RAY_DISABLE_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    found = Cluster(f"{host}:{port}", tmp_path_factory.mktemp("ray"), env)
    temporary = tmp_path_factory.mktemp("r", numbered=True)
    short = Path(f"/tmp/r{os.getpid()}")  # sockets have short names
    short.symlink_to(temporary)
    try:
        head = ("--head", f"--port={port}", f"--temp-dir={short}", "--include-dashboard=false")
        found.start(*head)
        until(lambda: found.nodes_alive() == 1)
        found.start(f"--address={found.address}")
        until(lambda: found.nodes_alive() == 2)
        yield found
    finally:
        for node in reversed(found.nodes):
            found.end(node)
        short.unlink()


@pytest.mark.slow
def test_a_script_trains_as_under_spartito_run(cluster: Cluster) -> None:
    import torch

    words = ["--workers", "2", "--strategy", "mirrored", cluster.script(TRAIN)]
    there = cluster.run("--placement", "spread", *words, "there.pt")
    assert there.returncode == 0, there.stderr
    assert "mirrored, 2 replicas" in there.stderr
    assert "[worker 0] epoch 2/2  loss" in there.stdout
    here = cluster.python("-m", "spartito", "run", *words, "here.pt")
    assert here.returncode == 0, here.stderr
    one, other = (torch.load(cluster.directory / f"{name}.pt") for name in ("there", "here"))
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_the_first_task_that_fails_decides(cluster: Cluster) -> None:
    ended = cluster.run("--workers", "2", "--log-dir", "logs", cluster.script(ENDS))
    assert ended.returncode == 7
    assert "worker 0 was stopped because worker 1 failed with exit code 7" in ended.stderr
    assert {path.name for path in (cluster.directory / "logs").iterdir()} == {
        "worker-0.log",
        "worker-1.log",
    }


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_tasks_end_with_their_launcher(cluster: Cluster, number: signal.Signals) -> None:
    job, pids = cluster.waiting("--placement", "spread")
    job.send_signal(number)
    text, _ = job.communicate(timeout=LIMIT)
    if number == signal.SIGINT:
        assert job.returncode == 130, text
        assert text.count("heard") == 2, text  # and nobody had to be killed
    until(lambda: all(map(gone, pids)))


@pytest.mark.slow
def test_what_cannot_be_is_said_before_anything_is_made(cluster: Cluster) -> None:
    script = cluster.script(WAITS)
    many = cluster.run("--workers", "5", script)
    assert many.returncode == 2
    assert "5 tasks, one of 1 CPU, do not fit this Ray cluster" in many.stderr
    other = cluster.python(
        "-c", OTHER_VERSION, "run", "--ray", cluster.address, "--workers", "2", script
    )
    assert other.returncode == 2
    assert "has other versions" in other.stderr
    assert "2.1.0" in other.stderr
    assert other.stderr.count("Traceback") == 0


@pytest.mark.slow
def test_a_ray_program_launches_functions(cluster: Cluster) -> None:
    ended = cluster.python(cluster.script(PROGRAM), cluster.address)
    assert ended.returncode == 0, ended.stderr
    assert "kept 0" in ended.stdout
    assert "error" not in ended.stderr


@pytest.mark.slow
def test_the_example_of_the_page_runs(cluster: Cluster) -> None:
    pages = Path(__file__).parents[2] / "docs" / "guides" / "clusters"
    of_notebooks, of_ray = ((pages / name).read_text() for name in ("python.md", "ray.md"))
    (function,) = re.findall(r"```python\n(.*?)\n\n\nhistory = sp.launch\(", of_notebooks, re.S)
    (program,) = re.findall(r"```py\n(import ray.*?)```", of_ray, re.S)
    cluster.env["RAY_ADDRESS"] = cluster.address
    ended = cluster.python(cluster.script(f"{function}\n\n\n{program}"))
    del cluster.env["RAY_ADDRESS"]
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^\[\d\.\d+\]$", ended.stdout, re.M), ended.stdout


@pytest.mark.slow
def test_a_lost_node_ends_the_job_and_names_its_task(cluster: Cluster) -> None:
    job, pids = cluster.waiting("--placement", "strict_spread")
    second = cluster.nodes.pop()
    cluster.end(second)
    text, _ = job.communicate(timeout=LIMIT)
    assert job.returncode == 69, text
    assert re.search(r"worker \d+ was killed by SIGHUP", text)
    assert "its actor is lost" in text
    until(lambda: all(map(gone, pids)))


@pytest.mark.slow
def test_the_end_of_the_cluster_ends_the_job(cluster: Cluster) -> None:
    job, pids = cluster.waiting()
    while cluster.nodes:  # the head is the first; the other one may have been lost before
        cluster.end(cluster.nodes.pop(0))
    text, _ = job.communicate(timeout=LIMIT)
    assert job.returncode == 69, text
    assert "its actor is lost" in text
    assert "(raylet)" not in text
    until(lambda: all(map(gone, pids)))


def no_cluster(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spartito", "run", "--ray", *words], capture_output=True, text=True,
        timeout=LIMIT,
    )  # fmt: skip


@pytest.mark.slow
def test_no_cluster_at_the_address(tmp_path: Path) -> None:
    need("ray")
    try:
        import ray
    except ImportError as error:
        skip("ray", error)
    del ray
    script = tmp_path / "train.py"
    script.write_text("")
    ended = no_cluster(f"127.0.0.1:{free_port()}", str(script))
    assert ended.returncode == 2
    assert "there is no Ray cluster at 127.0.0.1:" in ended.stderr
    wrong = no_cluster("ray://127.0.0.1:10001", str(script))
    assert wrong.returncode == 2
    assert "Give the head's address as HOST:6379" in wrong.stderr


def test_tasks_fit_where_nodes_have_enough() -> None:
    def node(cpus: float, gpus: float = 0.0, alive: bool = True) -> dict[str, Any]:
        there = {"CPU": cpus, "GPU": gpus}
        return {"Alive": alive, "Resources": there, "NodeManagerAddress": f"n{cpus:g}"}

    worker = {"CPU": 2.0, "GPU": 1.0}
    check_fits([worker, worker, {"CPU": 1.0}], [node(4.0, 2.0), node(1.0)])
    for nodes in ([node(4.0, 1.0), node(4.0)], [node(3.0, 2.0)], [node(8.0, 8.0, alive=False)]):
        with pytest.raises(UserError, match="2 tasks, one of 2 CPU, 1 GPU, do not fit"):
            check_fits([worker, worker], nodes)


def test_a_node_with_another_python_is_named() -> None:
    own = versions()
    same = Node("10.0.0.1", "a", 20001, dict(own))
    check_nodes([same], own)
    # What an actor's `find` said under another Python, with the same Spartito.
    other = Node("10.0.0.2", "b", 20002, {**own, "Python": "3.12.4"}, niceness=15)
    with pytest.raises(UserError) as found:
        check_nodes([same, other], own)
    said = f"node 10.0.0.2 (b) has Python 3.12.4, Spartito {own['Spartito']}, and here is Python"
    assert said in str(found.value)


def test_a_node_without_the_folder_or_with_another_script_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv, own = ["train.py", "--epochs=1"], versions()
    for where, said in {
        "/nowhere/job": "the folder /nowhere/job cannot be entered: No such file or directory\n"
        "  The job's folder has to be on every node, at the same path",
        str(tmp_path): "there is no script 'train.py'\n"
        f"  It has to be on every node, as it is here: share {tmp_path}",
    }.items():
        with pytest.raises(UserError, match=re.escape(said)) as problem:
            check_runnable(where, argv)
        there = Node("10.0.0.1", "a", 20001, own, str(problem.value))
        with pytest.raises(UserError, match=re.escape(f"on node 10.0.0.1 (a): {said}")):
            check_nodes([there], own)
    Path("train.py").write_text("print(1)")
    here = checksum_of(argv)
    Path("train.py").write_text("print(2)")
    there = Node("10.0.0.2", "b", 20002, own, script=checksum_of(argv))
    check_nodes([there], own, there.script)
    with pytest.raises(UserError, match="another version of the script"):
        check_nodes([there], own, here)
