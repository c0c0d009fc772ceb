"""The cluster by a shared directory, where tasks find each other whose addresses nobody knows.

Each task has one file there, with the task's address, a random token of this start, and the
tokens of those that it has seen. A task is present for us once its file has our token: a file
that an earlier job left behind counts for nothing, and no clocks are compared.
"""

from __future__ import annotations

import atexit
import errno
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import msgspec

from spartito.cluster.address_list import (
    ENV_ADDRESS,
    ENV_CHIEF,
    ENV_EVALUATOR,
    ENV_PS,
    ENV_TASK,
    ENV_WORKERS,
    check_addresses,
    count,
    named_task,
    spec_of,
)
from spartito.cluster.endpoints import chosen_interface, port_range
from spartito.cluster.limits import time_limit
from spartito.cluster.spec import ClusterSpec, Task
from spartito.errors import TaskLostError, UserError
from spartito.names import ENV_TIMEOUT
from spartito.wire.addresses import address, is_loopback, split_address
from spartito.wire.interfaces import ELSEWHERE, addresses_of, own_name, source_address
from spartito.wire.ports import BELOW_EPHEMERAL, drawn, free_port, is_own

VARIABLE = "SPARTITO_CLUSTER_DIR"

COUNTS = {
    "chief": ENV_CHIEF,
    "worker": ENV_WORKERS,
    "ps": ENV_PS,
    "evaluator": ENV_EVALUATOR,
}
"""Which variable says how many tasks of a role there will be."""

TRIES = 50  # ports of which one must be free
LOOK_SECONDS = 0.1  # between two looks into the directory

_held: defaultdict[Task, ExitStack] = defaultdict(ExitStack)
"""The port of each task that we are, which nobody else takes, as the others may come hours later:
until this process ends, or joins as that task once more."""


def applies(env: Mapping[str, str]) -> bool:
    """Whether ``SPARTITO_CLUSTER_DIR`` names a directory."""
    return bool(env.get(VARIABLE, "").strip())


def from_directory(env: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster of those that came to ``SPARTITO_CLUSTER_DIR``; None if it is not set.

    ``SPARTITO_TASK`` says who we are, ``SPARTITO_WORKERS``, ``SPARTITO_PS``, ``SPARTITO_CHIEF``
    and ``SPARTITO_EVALUATOR`` how many there will be. Waits until all are there, or raises
    `TaskLostError` that names those who did not come within ``SPARTITO_TIMEOUT`` seconds (300).
    Within one process the same call returns the same cluster.
    """
    if not applies(env):
        return None
    task, expected = _named(env)
    folder = Path(env[VARIABLE].strip())
    given = env.get(ENV_ADDRESS, "").strip()
    listens = chosen_interface(env), port_range(env)
    found = _join(folder, task, expected, given, listens, time_limit(env=env))
    cluster: dict[str, tuple[str, ...]] = {}
    for other in expected:
        cluster[other.type] = (*cluster.get(other.type, ()), found[other])
    check_addresses(cluster, str(folder))
    return spec_of(cluster, task, str(folder))


def own_task(env: Mapping[str, str]) -> Task | None:
    """The task that we are of those that will come; None where nobody else will. Does not wait."""
    task, expected = _named(env)
    return task if len(expected) > 1 else None


class Card(msgspec.Struct, frozen=True):
    """What a task says in its file: its address, its token, and the tokens that it has seen."""

    address: str
    token: str
    seen: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Card | None:
        """The card in ``path``; None where there is none, or something else."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):  # stale: replaced as we looked
                raise
            return None
        except ValueError:
            return None  # not ours

    def write(self, path: Path) -> None:
        """Put it into ``path`` at once: no reader sees a half of it."""
        part = path.with_name(f".spartito-new-{self.token}-{path.name}")
        part.write_bytes(msgspec.json.encode(self))
        part.replace(path)


@cache
def _join(
    folder: Path,
    task: Task,
    expected: tuple[Task, ...],
    given: str,
    listens: tuple[str, range | None],
    limit: float,
) -> dict[Task, str]:
    """The address of each expected task, once all have seen each other.

    Ours is ``given``; else ``listens`` is our host, "" for any, and the ports allowed.
    """
    end = time.monotonic() + limit
    host, allowed = listens
    ports = _ports(allowed, expected.index(task), len(expected))
    card = Card(given or _own_address(host, ports, _emptied(task)), secrets.token_hex(8), {})
    split_address(card.address)
    others = [other for other in expected if other != task]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_own(_path(folder, task))
        card.write(_path(folder, task))
        while True:
            cards = {other: Card.read(_path(folder, other)) for other in others}
            seen = {str(other): read.token for other, read in cards.items() if read}
            if seen != card.seen:
                card = Card(card.address, card.token, seen)
                card.write(_path(folder, task))
            there = {
                other: read.address
                for other, read in cards.items()
                if read and read.seen.get(str(task)) == card.token
            }
            if len(there) == len(others):
                return {task: card.address, **there}
            if time.monotonic() > end:
                missing = [str(other) for other in others if other not in there]
                _path(folder, task).unlink(missing_ok=True)  # who comes now comes too late
                raise TaskLostError(
                    f"{' and '.join(missing)} did not come to {folder} within {limit:g} s",
                    f"Start it with the same {VARIABLE}; {ENV_TIMEOUT} sets the limit in seconds.",
                )
            time.sleep(LOOK_SECONDS)
    except OSError as error:
        raise UserError(
            f"{VARIABLE}={str(folder)!r} cannot be used: {error.strerror}",
            "Give a directory that all tasks can write to.",
        ) from error


def _check_own(path: Path) -> None:
    """Refuse to write over a file that no task has written."""
    if path.is_file() and path.stat().st_size and Card.read(path) is None:
        raise UserError(
            f"{path} was not written by Spartito, and would be replaced",
            f"Name another folder by {VARIABLE}.",
        )


def _path(folder: Path, task: Task) -> Path:
    return folder / f"{task.type}-{task.index}.json"


def _named(env: Mapping[str, str]) -> tuple[Task, tuple[Task, ...]]:
    """Who we are, and all that will come."""
    task, expected = named_task(env), _expected(env)
    if task is None:
        raise UserError(f"{VARIABLE} is set, but {ENV_TASK} is not", f"Set {ENV_TASK}='worker 0'")
    if task not in expected:
        raise UserError(
            f"{ENV_TASK} names {task}, but the job has {', '.join(map(str, expected))}",
            f"{COUNTS[task.type]} says how many there are.",
        )
    return task, expected


def _expected(env: Mapping[str, str]) -> tuple[Task, ...]:
    expected = tuple(
        Task(role, index) for role, name in COUNTS.items() for index in range(count(env, name, 0))
    )
    if not any(task.type in ("chief", "worker") for task in expected):
        raise UserError(
            f"{VARIABLE} is set, but {ENV_WORKERS} does not say for how many workers to wait",
            f"Set {ENV_WORKERS}=2, and {ENV_PS} if there are parameter servers.",
        )
    return expected


def _ports(allowed: range | None, number: int, count: int) -> Sequence[int]:
    """Ports to try for the ``number``-th of ``count`` tasks: those of one host must differ."""
    if allowed is None:
        ports = BELOW_EPHEMERAL[number::count]
        return drawn(ports, TRIES)
    start = number % len(allowed)
    return (*allowed[start:], *allowed[:start])


def _emptied(task: Task) -> ExitStack:
    """What holds the port of ``task``, without that of an earlier job."""
    if task not in _held:
        atexit.register(_held[task].close)
    _held[task].close()
    return _held[task]


def _own_address(host: str, ports: Sequence[int], held: ExitStack) -> str:
    """An address by which other machines reach this one, and a port that is ``held``."""
    host = host or _own_host()
    return address(host, free_port(host, ports, held))


def _own_host() -> str:
    """What our host name stands for, if that is ours and no loopback; else whence we go outside."""
    known = [host for host in addresses_of(own_name()) if ":" not in host]
    outside = [host for host in known if not is_loopback(host) and is_own(host)]
    if outside:
        return outside[0]
    return source_address(ELSEWHERE) or "127.0.0.1"  # a machine without a network has all tasks
