"""What is Linux's own is behind one package, and what stands for it elsewhere really works."""

from __future__ import annotations

import ast
import inspect
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from spartito.cluster import resolve
from spartito.collectives.membership import placement
from spartito.errors import UserError
from spartito.system import ENV_PORTABLE, fences, linux, portable
from spartito.system.files import temporary_folder
from tests.commands import (
    LIMIT,
    SPARTITO,
    Commands,
    Ended,
    commands_in,
    eventually,
    free_port,
)
from tests.skips import need, skip
from tests.test_public import FILES, ROOT

EXACT = 1e-12
SLOW = pytest.mark.slow
ELSEWHERE = Path(__file__).with_name("elsewhere")
PORTABLE = {
    ENV_PORTABLE: "1",
    "PYTHONPATH": os.pathsep.join([str(ELSEWHERE), os.environ["PYTHONPATH"]]),
}
"""The environment of a program that runs as on a system that is not Linux."""

NAMES = re.compile(
    "CDLL|CLOCK_BOOTTIME|MADV_|O_DIRECT$|O_PATH|O_TMPFILE|SIGRT|SO_RCVLOWAT|TCP_(KEEP|USER|CORK|QUICK)"
    "|copy_file_range|epoll|eventfd|getrusage|inotify|madvise|memfd|pidfd|pipe2|posix_fa|prctl"
    "|prlimit|sched_|signalfd|splice$|ru_maxrss"
)
"""What only Linux has, or what means something else there: no code but `system` names it."""
SYSTEM = {("sys", "platform"), ("platform", "machine"), ("platform", "system")}
PATHS = ("/proc", "/sys/", "/dev/shm")
OF_LINUX = ("chaos", "launch/containers", "launch/kubernetes", "launch/lines")
"""What is for Linux alone: faults, network namespaces, files for containers."""
INFORMS = {
    "comparison/load.py": {"getrusage"},  # of children, in seconds: as everywhere
    "comparison/run.py": {"platform.machine", "platform.system"},
    "collectives/membership/store.py": {"CDLL"},  # torch's own library
    "engine/devices/denormals.py": {"CDLL"},  # the same
    "doctor/report.py": {"/dev/shm free"},  # a column of a table
}
"""What other files may name, and why."""


def named(tree: ast.AST) -> Iterator[str]:
    """Names, attributes and paths of code, without docstrings."""
    texts = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            yield f"{owner}.{node.attr}" if (owner, node.attr) in SYSTEM else node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield "" if id(node) in texts else node.value


def only_linux(text: str) -> set[str]:
    """What in the text of a module is Linux's own."""
    return {
        name
        for name in named(ast.parse(text))
        if NAMES.match(name)
        or tuple(name.split(".")) in SYSTEM
        or any(path in name for path in PATHS)
    }


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.posix_fallocate(1, 0, 2)",
        "from os import sched_getaffinity",
        "from pathlib import Path\nx = Path('/proc/self/stat')",
        "import sys\nx = sys.platform == 'linux'",
        "x = f'{y}/dev/shm/z'",
    ],
)
def test_what_only_linux_has_is_found(text: str) -> None:
    assert only_linux(text)


def test_nothing_but_the_package_names_what_only_linux_has() -> None:
    found = {}
    for path in FILES:
        file = path.relative_to(ROOT).as_posix()
        if not file.startswith(("system/", *OF_LINUX)):
            found[file] = only_linux(path.read_text()) - INFORMS.get(file, set())
    assert {file: names for file, names in found.items() if names} == {}


def test_both_systems_have_the_same_functions() -> None:
    for name in portable.__all__:
        both = getattr(linux, name), getattr(portable, name)
        if inspect.isfunction(both[0]):
            assert inspect.signature(both[0]) == inspect.signature(both[1]), name
        else:
            assert isinstance(both[1], type(both[0]).__mro__[-2]), name


def test_both_say_the_same_of_this_process() -> None:
    def computed() -> float:
        found = portable.cpu_and_state(os.getpid())
        assert found is not None
        return found[0]

    own = linux.cpu_and_state(os.getpid())
    assert own is not None
    assert own[0] <= computed() + 0.02
    assert abs(linux.process_began() - portable.process_began()) < 1
    assert linux.peak_memory() == pytest.approx(portable.peak_memory(), rel=0.05)
    assert linux.resident_memory() == pytest.approx(portable.resident_memory(), rel=0.05)


def test_both_count_the_memory_of_a_process() -> None:
    """Of one that is no fork: what is common with its parent counts for one of them only."""
    code = (
        'from spartito.system import linux, portable\nx = b"x" * 200_000_000\n'
        "print(linux.anonymous_memory(), portable.anonymous_memory())"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    ours, theirs = map(int, printed.split())
    assert 200e6 < ours < 1e9
    assert ours == pytest.approx(theirs, rel=0.3)


def test_both_say_the_same_of_this_machine() -> None:
    assert linux.machine_memory()["MemTotal"] == portable.machine_memory()["MemTotal"]
    assert linux.affinity() <= portable.affinity()
    loopback = next(name for name in psutil.net_if_addrs() if linux.ipv4_of(name) == "127.0.0.1")
    assert portable.ipv4_of(loopback) == "127.0.0.1"
    assert portable.ipv4_of("no such interface") == ""
    assert sorted(portable.ipv6_addresses()) == sorted(linux.ipv6_addresses())


@pytest.mark.parametrize("system", [linux, portable])
def test_the_state_of_a_process(system: ModuleType) -> None:
    child = subprocess.Popen(["sleep", "300"])
    try:
        assert not system.end_within(child, 0.01)
        os.kill(child.pid, signal.SIGSTOP)
        assert eventually(lambda: (system.cpu_and_state(child.pid) or (0, ""))[1] == "T")
        state, began = system.process_start(child.pid)
        assert state == "T"
        assert began == system.process_start(child.pid)[1] > 0
    finally:
        child.kill()
    assert system.end_within(child, LIMIT)
    assert system.cpu_and_state(child.pid) is None
    assert system.process_start(child.pid) == ("", 0)


@pytest.mark.parametrize("system", [linux, portable])
def test_claimed_space_keeps_what_was_there(system: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"kept")
    with path.open("r+b") as file:
        system.reserve(file.fileno(), 0, 3 << 20)
        system.reserve(file.fileno(), 0, 2)
    assert path.read_bytes() == b"kept".ljust(3 << 20, b"\0")
    assert path.stat().st_blocks * 512 >= 3 << 20


@pytest.mark.parametrize("system", [linux, portable])
def test_the_kernel_takes_the_options_of_a_connection(system: ModuleType) -> None:
    with socket.socket() as connection:
        for option, value in system.keep_alive_options(10).items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
            assert connection.getsockopt(socket.IPPROTO_TCP, option) == value
        system.wake_after(connection, 100)


def test_another_processor_is_told_once_and_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(placement, "shares_memory", linux.shares_memory)
    monkeypatch.setattr(placement, "why_not_shared", linux.why_not_shared)
    said: list[str] = []
    monkeypatch.setattr(placement, "note", lambda text, *words: said.append(text % words))
    for rank, size in (("0", "2"), ("1", "2"), ("0", "1")):
        counts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        placement.note_sockets(
            resolve({**counts, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
        )
    assert said == [
        "memory is shared on x86-64 and ARM only, and this is riscv64: tasks exchange by sockets, "
        "which takes about ten times as long "
        "(docs/benchmarks.md, all-reduce on one machine)"
    ]


def test_memory_is_shared_where_there_are_fences(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fences.fences_of("x86_64") is not None
    assert fences.fences_of("aarch64") is None
    assert f"{fences.ENV_ARM}=1 asks" in fences.why_none("aarch64")
    monkeypatch.setenv(fences.ENV_ARM, "1")
    if (here := fences.fences_of("aarch64")) is None:
        skip("case", f"no {fences.LIBRARY} here")
    for fence in (here.release, here.acquire, here.full):
        fence()
    monkeypatch.setattr(fences, "LIBRARY", "libnothing.so.1")
    assert fences.fences_of("aarch64") is None
    assert "libnothing.so.1 (package libatomic1)" in fences.why_none("aarch64")


TRAINS = """
import json, sys
sys.modules["dill"] = None  # torch imports it if it can, and it needs a temporary folder
import torch
import spartito as sp

strategy = sp.strategy()
with strategy.scope():
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
    ).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
x = torch.randn(90, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())
trainer = sp.Trainer(
    net, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss(), strategy=strategy,
    deterministic=True,
)
history = trainer.fit(data, epochs=2, batch_size=16)
weights = [float(parameter.detach().abs().sum()) for parameter in net.parameters()]
if strategy.is_chief:
    print("numbers", json.dumps([history.history["loss"], weights]), flush=True)
"""

STANDS = """
import os, subprocess, sys, time
import spartito as sp
if os.environ["RANK"] == "1":
    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(300)"]
    subprocess.Popen(sleeper, start_new_session=True)
    print("all run", flush=True)
time.sleep(300)
"""


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as found:
        yield found


def numbers(ended: Ended) -> list[float]:
    """Losses and sums of weights that the script printed."""
    assert ended.code == 0, ended.text
    losses, weights = json.loads(ended.out.partition("numbers ")[2].splitlines()[0])
    return [*losses, *weights]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The numbers of one device, with all that Linux has."""
    with commands_in(tmp_path_factory.mktemp("plain")) as found:
        script = found.write("trains.py", TRAINS)
        return numbers(found.python(script, forks=True))


SOCKETS = "memory is shared on Linux only, and this is Linux used as another system: tasks exchange"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--workers", "1"], 0),
        (["--workers", "2", "--strategy", "mirrored"], 1),
        pytest.param(["--workers", "3", "--strategy", "sharded"], 1, marks=SLOW),
        pytest.param(
            ["--workers", "2", "--strategy", 'mirrored(communication="process_group")'],
            0,
            marks=SLOW,
        ),
        pytest.param(
            ["--workers", "1", "--ps", "1", "--strategy", "parameter_server(max_staleness=0)"],
            0,
            marks=SLOW,
        ),
        pytest.param(
            ["--workers", "2", "--ps", "1", "--strategy", "parameter_server(max_staleness=0)"],
            1,
            marks=[SLOW, pytest.mark.night],
        ),
    ],
    ids=["one_device", "mirrored", "sharded", "gloo", "server", "servers"],
)
def test_jobs_elsewhere(
    words: list[str], told: int, plain: list[float], commands: Commands
) -> None:
    script = commands.write("trains.py", TRAINS)
    ended = commands.spartito("run", *words, script, env=PORTABLE)
    assert numbers(ended) == pytest.approx(plain, rel=EXACT)
    assert ended.text.count(SOCKETS) == told


def test_one_copy_needs_memory_that_all_have(commands: Commands) -> None:
    script = commands.write("trains.py", TRAINS)
    words = ["--workers", "2", "--strategy", "central_storage"]
    ended = commands.spartito("run", *words, script, env=PORTABLE)
    assert ended.code == 2
    assert "central_storage for 2 replicas that share no memory\n  Choose mirrored" in ended.text
    assert "Traceback" not in ended.text


def test_a_recipe_its_report_and_its_table_elsewhere(commands: Commands) -> None:
    words = ["mnist", "--strategy", "mirrored", "--workers", "2", "--out", "run"]
    words += ["--epochs", "1", "--batch-size", "500"]
    assert commands.spartito("train", *words, env=PORTABLE).code == 0
    run = commands.directory / "run"
    assert "mirrored" in (run / "report.html").read_text()
    record = json.loads((run / "tasks" / "worker-1.json").read_text())
    assert 50 << 20 < record["peak_memory_bytes"] < 20 << 30
    table = commands.spartito("top", "run", "--once", env=PORTABLE)
    assert table.code == 0, table.text
    assert "worker 1" in table.out


@SLOW
def test_a_comparison_elsewhere(commands: Commands) -> None:
    script = commands.write("trains.py", TRAINS)
    words = ["--strategies", "one_device,mirrored", "--workers", "2", "--out", "compared"]
    ended = commands.spartito("compare", *words, script, env=PORTABLE)
    assert ended.code == 0, ended.text
    record = json.loads((commands.directory / "compared" / "compare.json").read_text())
    assert [run["exit_code"] for run in record["runs"]] == [0, 0]


@pytest.mark.parametrize("who", ["launcher", "a task"])
def test_nothing_outlives_a_launcher_elsewhere(who: str, commands: Commands) -> None:
    """Not even what left its process group; `end` sees that nothing is left."""
    script = commands.write("stands.py", STANDS)
    program = commands.start(*SPARTITO, "run", "--workers", "2", script, env=PORTABLE)
    program.wait_for("all run")
    if who == "launcher":
        program.send(signal.SIGKILL)
        assert program.end().code == -signal.SIGKILL
    else:
        task = next(one for one in psutil.Process(program.popen.pid).children() if is_task(one))
        task.kill()
        ended = program.end()
        assert ended.code == 69
        assert "was killed by SIGKILL" in ended.err


def is_task(process: psutil.Process) -> bool:
    return bool(process.environ().get("RANK") == "0")


def test_a_task_that_stands_still_is_named_elsewhere(commands: Commands) -> None:
    script = commands.write("stands.py", STANDS)
    program = commands.start(
        *SPARTITO, "run", "--workers", "2", "--notice", "1", script, env=PORTABLE
    )
    program.wait_for("all run")
    task = next(one for one in psutil.Process(program.popen.pid).children() if is_task(one))
    task.suspend()
    program.wait_for("worker 0 is stopped by a signal")
    task.resume()
    program.wait_for("worker 0 goes on")
    program.send(signal.SIGTERM)
    assert program.end().code == 128 + signal.SIGTERM


def test_chaos_is_for_linux(commands: Commands) -> None:
    ended = commands.spartito("chaos", "mnist", env=PORTABLE)
    assert (ended.code, ended.err) == (
        2,
        f"spartito: error: spartito chaos needs Linux, and this is linux with {ENV_PORTABLE}=1\n"
        "  Run it on a Linux machine or in a container.\n",
    )


def test_the_switch_is_on_or_off(commands: Commands) -> None:
    ended = commands.python("-c", "import spartito", env={ENV_PORTABLE: "yes"})
    assert ended.code == 2
    assert ended.err.startswith(f"spartito: error: {ENV_PORTABLE}='yes' is neither 0 nor 1\n")


def test_psutil_is_missed_by_name(commands: Commands) -> None:
    code = "import sys; sys.modules['psutil'] = None; from spartito import system\n"
    ended = commands.python("-c", f"{code}system.resident_memory()", env={ENV_PORTABLE: "1"})
    assert ended.code == 2
    assert "Spartito needs psutil, which is not installed\n  pip install psutil" in ended.err


@pytest.mark.parametrize("portable_too", ["0", "1"])
def test_a_folder_for_temporary_files_that_is_not_there(
    portable_too: str, commands: Commands
) -> None:
    script = commands.write("trains.py", TRAINS)
    env = {"TMPDIR": "/no/such/folder", ENV_PORTABLE: portable_too}
    ended = commands.spartito("run", "--workers", "2", script, env=env)
    assert (ended.code, ended.err) == (
        2,
        "spartito: error: TMPDIR='/no/such/folder' is no folder, so temporary files have none\n"
        "  Make that folder, or unset TMPDIR: then the system's is used.\n",
    )


def test_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    with pytest.raises(UserError, match=r"there is no folder .*No usable.*\n  Set TMPDIR"):
        temporary_folder()


READ_ONLY = "for at in {}; do mount -o bind,ro $at $at; done"
COUNTS = "WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1"
BY_HAND = "for n in 1 0; do RANK=$n LOCAL_RANK=$n {}& done; wait $!; code=$?; wait; exit $code"


@pytest.mark.parametrize("launched", [True, False])
@pytest.mark.parametrize("everywhere", [True, False])
def test_memory_that_cannot_be_written(
    launched: bool, everywhere: bool, commands: Commands, plain: list[float]
) -> None:
    """Files that processes map are among the temporary ones then; without those it is an error."""
    need("mount")
    script = commands.write("trains.py", TRAINS)
    start = f"{sys.executable} -m spartito run --workers 2 {script}"
    if not launched:
        task = f"{COUNTS} MASTER_PORT={free_port()} {sys.executable} {script}"
        start = BY_HAND.format(task)
    folders = "/dev/shm /tmp /var/tmp" if everywhere else "/dev/shm"
    lines = [READ_ONLY.format(folders), "cd /proc", start]
    ended = commands.start("unshare", "-m", "sh", "-ec", "\n".join(lines)).end()
    if everywhere:
        assert ended.code == 2, ended.text
        assert "Traceback" not in ended.text
        assert "spartito: error: there is no folder for temporary files: " in ended.text
    else:
        assert numbers(ended) == pytest.approx(plain, rel=EXACT)
        assert "/dev/shm cannot hold" in ended.text
