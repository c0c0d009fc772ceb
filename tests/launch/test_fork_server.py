"""Tasks that are forked from one process: the same as tasks with a Python of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from spartito.launch.processes import fork_server
from spartito.launch.processes.fork_server import OWN, ForkServer, gains, largest
from spartito.launch.processes.process import Process
from spartito.names import ENV_FORK, ENV_FORK_SERVER
from tests import skips
from tests.commands import SPARTITO, Commands, Program, eventually

pytestmark = skips.on_linux

BEGINS = """
import sys
if was_forked := "torch" in sys.modules:
    import torch
"""
"""Of a script that tells whether it was forked, and gains by it; else it does without torch."""

TELLS = (
    BEGINS
    + """
import gc, json, os, random, signal, threading
import numpy, torch

gc.unfreeze()  # else it does not see what the server had
mains = [one for one in gc.get_objects() if type(one) is type(sys) and one.__name__ == __name__]
names = sorted(set(globals()) - {"__warningregistry__"})

def tells():
    main = sys.modules["__main__"]
    lines = open("/proc/self/environ", "rb").read().rstrip(b"\\0").split(b"\\0")
    shown = dict(os.fsdecode(line).split("=", 1) for line in lines)
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGPIPE
    handlers = {number: str(signal.getsignal(number)) for number in numbers}
    return {
        "name": __name__, "file": __file__, "spec": __spec__ and __spec__.name,
        "package": __package__, "is main": main.tells is tells, "argv": sys.argv,
        "cached": __cached__, "names": names, "mains": len(mains),
        "orig_argv": sys.orig_argv, "path": sys.path, "folder": os.getcwd(),
        "environment": dict(os.environ), "shown": shown == dict(os.environ),
        "command line": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
        "own session": os.getsid(0) == os.getpid() == os.getpgid(0),
        "stdin": sys.stdin.read(), "terminal": os.isatty(1), "handlers": handlers,
        "threads": torch.get_num_threads(), "python's": len(threading.enumerate()),
        "open": sorted(os.listdir("/proc/self/fd")), "umask": os.umask(0o22),
        "mask": str(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }

told = tells()
draws = [random.random(), numpy.random.rand(), torch.rand(()).item()]
with open(f"told-{os.environ['RANK']}", "w") as file:
    json.dump([was_forked, draws, os.getppid(), told], file)
"""
)

FORKS, NOT = {ENV_FORK: "1"}, {ENV_FORK: "0"}


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    commands = Commands(tmp_path)
    yield commands
    commands.close()


def both(commands: Commands, *words: str, code: int = 0) -> list[str]:
    """What a job of two workers prints if its tasks are forked, and if they are not."""
    texts = []
    for env in (FORKS, NOT):
        ended = commands.spartito("run", "--workers", "2", *words, env=env)
        assert ended.code == code, ended.text
        texts.append(ended.err)
    return texts


@pytest.mark.parametrize("form", ["script", "in a folder", "module", "package"])
def test_a_forked_task_finds_what_its_own_python_gives(commands: Commands, form: str) -> None:
    words = {
        "script": ["tells.py"],
        "in a folder": ["deep/tells.py"],
        "module": ["-m", "tells"],
        "package": ["-m", "deep"],
    }[form]
    (commands.directory / "deep").mkdir()
    for name in ("tells.py", "deep/tells.py", "deep/__main__.py"):
        commands.write(name, TELLS)
    found: list[list[Any]] = []
    for env, is_forked in ((FORKS, True), (NOT, False)):
        commands.spartito("run", "--workers", "2", *words, "a", "--b", env=env)
        files = [commands.directory / f"told-{rank}" for rank in (0, 1)]
        told = [json.loads(file.read_text()) for file in files]
        assert [each[0] for each in told] == [is_forked, is_forked]
        assert len({draw for _, draws, _, _ in told for draw in draws}) == 6  # none draws alike
        assert len({parent for _, _, parent, _ in told}) == 1
        found.append([each[3] for each in told])
    for forked, own in zip(*found, strict=True):
        # The job's own: its ports and temporary files, and the mark of its processes.
        of_job = {
            name
            for name, value in own["environment"].items()
            if value != forked["environment"].get(name)
        }
        assert of_job <= {
            ENV_FORK,
            "MASTER_PORT",
            "SPARTITO_HEARTBEAT",
            "SPARTITO_JOB",
            "SPARTITO_SECRET_FILE",
            "SPARTITO_TEST_MARK",
        }
        assert set(forked.pop("environment")) == set(own.pop("environment"))
        assert forked == own


def test_an_exception_is_shown_as_python_shows_it(commands: Commands) -> None:
    commands.write("fails.py", BEGINS + "def inner():\n    raise ValueError('no')\ninner()\n")
    forked, own = both(commands, "fails.py", code=1)
    assert "in inner" in forked
    assert forked.partition("Traceback")[2] == own.partition("Traceback")[2]


def test_an_exception_before_the_program_is_found_says_where(commands: Commands) -> None:
    (commands.directory / "deep").mkdir()
    commands.write("deep/__init__.py", "def inner():\n    raise ValueError('no')\ninner()\n")
    commands.write("deep/trains.py", "import torch\n")
    forked, _ = both(commands, "-m", "deep.trains", code=1)
    assert "in inner" in forked
    assert "forked_task" not in forked


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit('no')", 1),
        ("import os; os.kill(os.getpid(), 9)", 69),
        ("import os; os.kill(os.getpid(), 11)", 139),
        ("raise KeyboardInterrupt", 130),
        ("import atexit; atexit.register(lambda: print('at the end'))", 0),
    ],
)
def test_ends_are_those_of_python(commands: Commands, end: str, code: int) -> None:
    commands.write("ends.py", BEGINS + end)
    both(commands, "ends.py", code=code)


def test_a_script_that_python_cannot_read_says_where(commands: Commands) -> None:
    commands.write("broken.py", BEGINS + "def (\n")
    forked, own = both(commands, "broken.py", code=1)
    forked, own = (text.partition("\n")[2] for text in (forked, own))  # either failed first
    assert "SyntaxError" in forked
    assert forked == own


def test_what_main_defines_can_be_sent_to_processes_of_its_own(commands: Commands) -> None:
    commands.write(
        "pools.py",
        BEGINS
        + "import multiprocessing\ndef double(number):\n    return 2 * number\n"
        + "if __name__ == '__main__':\n    assert was_forked\n"
        + "    for method in ('spawn', 'fork', 'forkserver'):\n"
        + "        with multiprocessing.get_context(method).Pool(1) as pool:\n"
        + "            assert pool.map(double, [1, 2]) == [2, 4]\n",
    )
    ended = commands.spartito("run", "--workers", "2", "pools.py", env=FORKS)
    assert ended.code == 0, ended.text


@pytest.mark.parametrize("moment", ["while it imports", "while tasks run"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_launcher(
    commands: Commands, moment: str, number: signal.Signals
) -> None:
    waits = "import pathlib, time\npathlib.Path('is-here').touch()\nwhile True: time.sleep(0.05)\n"
    commands.write("waits.py", "import torch\n" + waits)
    env = FORKS
    if moment == "while it imports":
        (commands.directory / "slow").mkdir()
        commands.write("slow/torch.py", waits)  # the server finds this one first
        env = FORKS | {"PYTHONPATH": str(commands.directory / "slow")}
    program = commands.start(*SPARTITO, "run", "--workers", "2", "waits.py", env=env)
    wait_for(commands.directory / "is-here", program)
    program.send(number)
    assert program.end().code == (130 if number == signal.SIGINT else -9)  # and nothing is left


def wait_for(path: Path, program: Program) -> None:
    """Until there is a file."""
    assert eventually(path.exists), program.with_stacks()


def test_what_cannot_be_imported_is_said_by_a_task(commands: Commands) -> None:
    commands.write("trains.py", "import torch\n")
    commands.write("torch.py", "raise RuntimeError('half installed')\n")
    forked, own = both(commands, "trains.py", code=1)
    assert "RuntimeError: half installed" in forked
    assert forked.partition("Traceback")[2] == own.partition("Traceback")[2]


def test_a_task_that_is_started_again_is_forked_too(commands: Commands) -> None:
    commands.write(
        "again.py",
        BEGINS
        + "import os\nassert was_forked\nname = 'began-' + os.environ['RANK']\n"
        + "if os.environ['RANK'] == '1' and not os.path.exists(name):\n"
        + "    open(name, 'w').close()\n    os.kill(os.getpid(), 9)\n",
    )
    words = ["--workers", "2", "--recover", "--strategy", "mirrored"]
    ended = commands.spartito("run", *words, "again.py", env=FORKS)
    assert ended.code == 0, ended.text
    assert "it is started again" in ended.err


def test_a_server_that_stands_still_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\n")
    task = process("worker 0", str(script), **os.environ)
    reads, writes = os.pipe()
    before = set(psutil.Process().children())
    server = ForkServer.begun(task.env)
    try:
        assert server.wait()
        (child,) = set(psutil.Process().children()) - before
        child.suspend()
        monkeypatch.setattr(fork_server, "LIMIT", 0.01)
        assert server.start(task.argv, task.env, writes) is None
        monkeypatch.undo()
        assert server.start(task.argv, task.env, writes) is None  # it is gone
    finally:
        server.close()
        os.close(reads)
        os.close(writes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import os, sys\nfrom pathlib import Path\n", False),
        ("import os, torch\n", True),
        ("from .model import net\n", True),
        ("def main():\n    import train.model\n", True),
        ("from __future__ import annotations\n", False),
        ("def (\n", False),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch\n", False),
        ("from os import environ\nenviron.setdefault('A', 'b')\nimport torch\n", False),
        ("import os, torch\nos.environ |= {'A': 'b'}\n", False),
        ("import os, torch\ndel os.environ['A']\n", False),
        ("import os, torch\nos.putenv('A', 'b')\n", False),
        ("import os, torch\nprint(os.environ['RANK'], os.environ.get('A'))\n", True),
    ],
)
def test_which_scripts_gain_by_a_server(tmp_path: Path, text: str, expected: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    assert gains([str(script)]) is expected


def test_modules_gain_unless_they_are_pythons_own() -> None:
    assert gains(["-m", "spartito.recipes.mnist"])
    assert not gains(["-m", "timeit"])


def test_a_module_that_sets_variables_gains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trains").mkdir()
    for name in ("trains/__main__.py", "trains/early.py"):
        (tmp_path / name).write_text("import os\nos.environ['A'] = 'b'\nimport torch\n")
    (tmp_path / "trains/late.py").write_text("import torch\n")
    found = {name: gains(["-m", name]) for name in ("trains", "trains.early", "trains.late")}
    assert found == {"trains": False, "trains.early": False, "trains.late": True}


def test_a_fork_that_the_launcher_cannot_know_of_does_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    (enlisted, enlists), (begins, go) = os.pipe(), os.pipe()
    server = ForkServer.begun(os.environ)
    assert server.wait()
    with open(os.devnull, "r+b") as nothing:
        socket.send_fds(server._asks, [b"+"], [*[nothing.fileno()] * 3, enlists, begins])
    request = {"program": [str(script)], "folder": "/", "env": dict(os.environ), "kind": ""}
    server._asks.sendall(json.dumps(request).encode() + b"\n")
    server._asks.close()  # where the server would say of whom it has forked
    for number in (enlists, begins, go):
        os.close(number)
    with open(enlisted, "rb") as file:
        assert file.read() == b""  # nobody has begun, and nobody is left who could
    server.close()


def test_a_task_begins_though_the_server_is_ended_at_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    _, enlists = os.pipe()
    server = ForkServer.begun(os.environ)
    assert server.wait()
    task = server.start([sys.executable, str(script)], os.environ, enlists)
    server.close()
    assert task is not None
    assert task.stdout is not None
    assert task.stderr is not None
    with task.stdout, task.stderr:
        assert task.wait() == 0


def test_a_program_has_the_server_that_it_was_started_with(tmp_path: Path) -> None:
    launcher = """
import os, sys
assert "torch" not in sys.modules
from spartito.launch.processes.fork_server import ForkServer
server = ForkServer.inherited()
assert ForkServer.inherited() is None
assert server.wait()
with open(os.devnull, "wb") as nobody:
    task = server.start([sys.executable, "task.py"], dict(os.environ), nobody.fileno())
with task.stdout, task.stderr:
    print(task.stdout.read().decode(), task.stderr.read().decode(), task.wait(), os.getcwd())
server.close()
"""
    (tmp_path / "launcher.py").write_text(launcher)
    (tmp_path / "task.py").write_text(BEGINS + "import os\nprint(was_forked, os.getcwd())\n")
    server = ForkServer.begun(os.environ)
    try:
        assert server.wait()
        before = set(psutil.Process().children(recursive=True))
        with open(os.devnull, "wb") as nobody:
            words = [sys.executable, "launcher.py"]
            found = server.start(words, os.environ, nobody.fileno(), folder=tmp_path, launches=True)
        assert found is not None
        assert found.stdout is not None
        assert found.stderr is not None
        with found.stdout, found.stderr:
            folder = str(tmp_path).encode()
            assert found.stdout.read().split() == [b"True", folder, b"0", folder]
            assert found.stderr.read() == b""
            assert found.wait() == 0
        assert eventually(lambda: set(psutil.Process().children(recursive=True)) <= before)
    finally:
        server.close()


def test_a_server_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_FORK_SERVER, f"{os.getppid()} 1 2 kind")
    assert ForkServer.inherited() is None
    assert ENV_FORK_SERVER not in os.environ


def test_runs_of_a_comparison_are_forked(commands: Commands) -> None:
    commands.write(
        "train.py",
        BEGINS
        + "import os\nimport spartito as sp\nfrom torch import nn\n"
        + "print('forked' if was_forked else 'not', os.environ['OMP_NUM_THREADS'])\n"
        + "trainer = sp.Trainer(nn.Linear(1, 1), optimizer=torch.optim.SGD, loss=nn.MSELoss())\n"
        + "trainer.fit((torch.zeros(4, 1), torch.zeros(4, 1)), batch_size=2, verbose=False)\n",
    )
    ended = commands.spartito("compare", "train.py", "--strategies=one_device,mirrored", env=FORKS)
    assert ended.code == 0, ended.text
    assert ended.out.count("forked 1") == 3, ended.text


def test_functions_are_forked_from_one_process_call_after_call(commands: Commands) -> None:
    commands.write(
        "calls.py",
        "import os, psutil\nimport spartito as sp\n"
        "def server():\n    return [child.pid for child in psutil.Process().children()]\n"
        "def task():\n    return os.getppid(), os.getcwd()\n"
        "if __name__ == '__main__':\n"
        "    for variable, folder in (('a', '.'), ('a', '/'), ('b', '/')):\n"
        "        os.environ['VARIABLE'] = variable\n"
        "        os.chdir(folder)\n"
        "        assert sp.launch(task, workers=2) == (os.getpid(), os.getcwd())\n"
        "        print(*server())\n",
    )
    ended = commands.python("calls.py", env=FORKS)
    assert ended.code == 0, ended.text
    first, second, other = map(int, ended.out.split())  # one each
    assert first == second != other
    # and nothing is left of them


def process(name: str, *words: str, python: str = sys.executable, **env: str) -> Process:
    return Process(name, [python, *(words or ["train.py"])], env)


def test_those_that_differ_in_who_they_are_alone_are_alike() -> None:
    workers = [process(f"worker {rank}", RANK=str(rank), A="1") for rank in range(2)]
    assert largest(workers) is workers[0]
    assert largest(workers[:1]) is None
    assert largest([workers[0], process("worker 1", RANK="1", A="2")]) is None


@pytest.mark.parametrize(
    "odd",
    [{"python": "/usr/bin/other"}, {ENV_FORK: "0"}],
)
def test_what_cannot_be_forked(odd: dict[str, str]) -> None:
    assert largest([process(f"worker {rank}", **odd) for rank in range(2)]) is None
    programs = (["train"], ["-c", "pass"], ["ip", "netns"])
    assert [largest([process("a", *words), process("b", *words)]) for words in programs] == [
        None
    ] * 3


def test_the_largest_kind_is_taken() -> None:
    server = process("ps 0", OMP_NUM_THREADS="1")
    workers = [process(f"worker {n}", OMP_NUM_THREADS="4", TF_CONFIG=str(n)) for n in range(3)]
    assert largest([server, server, *workers]) is workers[0]
    assert "OMP_NUM_THREADS" not in OWN
