"""Lines between tasks: what they are called, and machines on them, of which nothing stays."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spartito.errors import UserError
from spartito.launch.lines.job import machines_on
from spartito.launch.lines.line import Link
from spartito.launch.lines.network import NoNamespacesError, network
from spartito.launch.processes.local import Local
from spartito.launch.processes.roles import Roles
from tests.commands import SPARTITO, SUITE, Commands, commands_in, eventually
from tests.launch.jobs import start
from tests.skips import need, skip

MBIT = 8
TELLS = """
import json, os, signal, socket, sys, time
config = json.loads(os.environ["TF_CONFIG"])
(kind, index), tasks = config["task"].values(), config["cluster"]["worker"]
where = [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("net", "mnt", "ipc")]
print("here", json.dumps([*where, os.stat("/dev/shm").st_dev, tasks[index]]), flush=True)
"""
SENDS = (
    TELLS
    + """
host, port = tasks[1].split(":")
if index == 1:
    with socket.create_server((host, int(port))) as server, server.accept()[0] as other:
        began, got = time.monotonic(), 0
        while data := other.recv(1 << 16):
            got += len(data)
        print("mbit", got * 8e-6 / (time.monotonic() - began), flush=True)
else:
    while True:
        try:
            other = socket.create_connection((host, int(port)))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    with other:
        other.sendall(bytes(1_000_000))
"""
)
WAITS = TELLS + 'print("waiting", flush=True)\nsignal.pause()\n'
FAILS = TELLS + "sys.exit(3 if index else signal.pause())\n"
DELAYED = TELLS + 'os.system("ping -c 2 -q worker-1 || true")\n'


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Programs that start in a folder of their own, where machines can be made."""
    need("netns")
    try:
        with network("a", needs=()):
            pass
    except NoNamespacesError as error:
        skip("netns", error)
    with commands_in(tmp_path) as found:
        yield found


def told(text: str) -> list[list[Any]]:
    """Where the tasks said that they are."""
    return [json.loads(found) for found in re.findall(r"here (\[.*\])", text)]


def inhabited() -> set[int]:
    """The networks in which a process of this suite is, by their number.

    A network that another makes, as an engine does, may get the number of one that is gone.
    """
    own, found = f"{SUITE}={os.environ[SUITE]}".encode(), set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if own in (process / "environ").read_bytes().split(b"\0"):
                found.add(os.stat(process / "ns" / "net").st_ino)
    return found


@given(st.integers(10_000, 10**12), st.integers(0, 10_000_000))
def test_a_line_is_what_it_says_it_is(rate: int, microseconds: int) -> None:
    link = Link(rate, microseconds / 1e6)
    again = Link.read(str(link))
    assert again.rate == pytest.approx(rate, rel=1e-5)
    assert again.delay == pytest.approx(link.delay, rel=1e-5, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "spoken", "rate", "delay"),
    [
        ("100mbit", "100 Mbit/s", 1e8, 0.0),
        ("1gbit", "1 Gbit/s", 1e9, 0.0),
        ("2.5gbit,500us", "2.5 Gbit/s with 0.5 ms one way", 2.5e9, 0.0005),
        ("10mbit,50ms", "10 Mbit/s with 50 ms one way", 1e7, 0.05),
        ("64kbit,1s", "64 kbit/s with 1000 ms one way", 64e3, 1.0),
    ],
)
def test_what_the_user_types(text: str, spoken: str, rate: float, delay: float) -> None:
    link = Link.read(text)
    assert (str(link), link.spoken) == (text, spoken)
    assert (link.rate, link.delay) == pytest.approx((rate, delay))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fast", "'fast' is not a rate"),
        ("", "'' is not a rate"),
        ("100", "'100' is not"),
        ("100mbit,", "'100mbit,' is not"),
        ("100mbit,50", "is not a rate and a delay"),
        ("50ms,100mbit", "is not a rate and a delay"),
        ("-1mbit", "is not a rate"),
        ("100Mbit/s", "is not a rate"),
        ("0mbit", "from 10kbit"),
        ("2000gbit", "from 10kbit"),
        ("1gbit,60s", "at most 10s"),
    ],
)
def test_words_that_are_no_line(text: str, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        Link.read(text)


def test_both_ends_have_the_rate_and_one_the_delay() -> None:
    link = Link.read("100mbit,50ms")
    assert " ".join(link.out) == "tbf rate 100000000bit burst 4000 latency 400ms"
    assert " ".join(link.back) == "netem limit 100000 delay 50000us rate 100000000bit"
    for rate, out, back in (
        ("10mbit", 4_000, 4_000),
        ("100mbit", 4_000, 12_500),
        ("1gbit", 31_250, 125_000),  # a quarter of a millisecond, and a whole one
        ("10gbit", 125_000, 1_250_000),
        ("100gbit", 1_250_000, 12_500_000),
    ):
        plain = Link.read(rate)
        bursts = [words[words.index("burst") + 1] for words in (plain.out, plain.back)]
        assert bursts == [str(out), str(back)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nnodes": 2, "master_addr": "a:1"}, "starts here as a whole"),
        ({"recover": True}, "--recover with --link 100mbit"),
        ({"strategy": "mirrored"}, "mirrored is for one machine"),
        ({"strategy": "central_storage"}, "central_storage is for one machine"),
        ({"link": "slow"}, "is not a rate"),
        ({"slow": ("worker:7=0.5",)}, "worker:7"),
    ],
)
def test_jobs_that_cannot_be_on_a_line(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(UserError, match=re.escape(says)):
        start(Local, [str(script)], **{"workers": 2, "link": "100mbit", **options})


def test_who_cannot_make_machines_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 1000)
        with (
            pytest.raises(UserError, match=r"need root\n.*as root"),
            machines_on(Link(1e8), Roles(2)),
        ):
            pass
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(UserError, match="there is no ip here"), machines_on(Link(1e8), Roles(2)):
        pass


def test_each_task_is_on_a_machine_at_that_line(commands: Commands) -> None:
    script = commands.write("sends.py", SENDS)
    ended = commands.spartito("run", "--link", f"{MBIT}mbit", "--workers", "2", script)
    assert ended.code == 0, ended.text
    here, there = told(ended.out)
    assert all(one != other for one, other in zip(here, there, strict=True))
    assert sorted(at[-1] for at in (here, there)) == ["10.77.0.1:29500", "10.77.0.2:29500"]
    found = re.search(r"mbit ([\d.]+)", ended.out)
    assert found is not None
    # 16 kB go at once at each end; a machine that is busy only makes it less.
    assert float(found[1]) < 1.2 * MBIT
    assert not inhabited() & {here[0], there[0]}


def test_a_delay_is_there_or_refused(commands: Commands) -> None:
    script = commands.write("late.py", DELAYED)
    ended = commands.spartito("run", "--link", "100mbit,20ms", "--workers", "2", script)
    if ended.code == 0:
        found = re.search(r"min/avg/max\S* = ([\d.]+)", ended.out)
        assert found is not None, ended.text
        assert float(found[1]) >= 40
    else:
        assert ended.code == 2
        assert "--link 100mbit,20ms cannot be made" in ended.err
        assert "leave it out: --link 100mbit" in ended.err
        assert "here [" not in ended.out


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_nothing_stays_however_it_ends(
    commands: Commands, number: signal.Signals, code: int
) -> None:
    script = commands.write("waits.py", WAITS)
    job = commands.start(*SPARTITO, "run", "--link", "100mbit", "--workers", "2", script)
    for _ in range(2):
        job.wait_for("waiting")
    job.send(number)
    ended = job.end()
    assert ended.code == code, ended.text
    made = {at[0] for at in told(ended.out)}
    assert len(made) == 2
    assert eventually(lambda: not inhabited() & made)
    cards = {path.name for path in Path("/sys/class/net").iterdir()}
    assert not cards & {"bridge", "worker-0", "worker-1"}


def test_a_task_that_fails_ends_the_job(commands: Commands) -> None:
    script = commands.write("fails.py", FAILS)
    ended = commands.spartito("run", "--link", "100mbit", "--workers", "2", script)
    assert ended.code == 3, ended.text
    assert eventually(lambda: not inhabited() & {at[0] for at in told(ended.out)})
