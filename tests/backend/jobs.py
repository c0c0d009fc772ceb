"""What the replicas of these tests run: a job is told the backend's name, and no more of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

from spartito.backend import connect
from spartito.system import host_key
from tests.backend.operations import Pending, Step, differences, expected, start
from tests.replicas import warns

LIMIT = timedelta(seconds=60)  # one that compiles is late
_KEPT: list[object] = []
"""Groups of gloo, which aborts where its own thread is the last that lets go of one."""

OLD = "`?torch.* deprecated"
"""Of what programs know by an older name, and what torch itself still uses."""


def live_on(machine: str) -> None:
    """Let this process take itself to be on ``machine``."""
    connect.host_key = lambda: machine  # type: ignore[attr-defined]


@contextmanager
def group_of(backend: str) -> Iterator[int]:
    """A default process group, as torchrun's variables say; gives the rank.

    "spartito on ab" puts each rank on the machine of its letter.
    """
    backend, _, machines = backend.partition(" on ")
    live_on(machines[int(os.environ["RANK"])] if machines else host_key())
    dist.init_process_group(backend, timeout=LIMIT)
    if backend == "gloo":
        _KEPT.append(dist.group.WORLD)
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


@warns(OLD)
def steps(backend: str, program: Sequence[Step]) -> list[str]:
    """What is wrong with the results of ``program``; async steps are waited for at its end."""
    wrong: list[str] = []
    with group_of(backend) as rank:
        groups = {step.members: None for step in program}
        made = {members: dist.new_group(list(members), timeout=LIMIT) for members in groups}
        pending: list[tuple[Step, Pending]] = []
        for step in program:
            if rank not in step.members:
                continue
            try:
                end = start(step, rank, made[step.members])
                if step.is_async:
                    pending.append((step, end))
                else:
                    wrong += differences(step, end(), expected(step, rank))
            except Exception as error:
                wrong.append(f"{step}: {error!r}")
        for step, end in pending:
            wrong += differences(step, end(), expected(step, rank))
        dist.barrier()
    return wrong


@warns(OLD, "FSDP2-wrapped module")
def program(backend: str, name: str, folder: str) -> list[float]:
    """The numbers of ``module.function`` of `tests.backend.programs`; ``folder`` is its own."""
    module, _, function = name.partition(".")
    made = getattr(import_module(f"tests.backend.programs.{module}"), function)
    torch.manual_seed(0)
    with group_of(backend):
        found: list[float] = made(Path(folder))
    return found


@warns(OLD)
def refusals(backend: str) -> dict[str, tuple[list[str], str]]:
    """What `failing.refused` finds."""
    from tests.backend.failing import refused

    with group_of(backend):
        return refused(backend)


def noise(rank: int, floats: int) -> torch.Tensor:
    """Numbers whose sum depends on its order."""
    return torch.randn(floats, generator=torch.Generator().manual_seed(rank))


def digest(values: torch.Tensor) -> str:
    """Equal for equal bits."""
    return sha256(values.numpy().tobytes()).hexdigest()


@warns(OLD)
def sums(backend: str, floats: int) -> list[str]:
    """The digest of the sum of the ranks' `noise`: all at once, reduced, and in slices."""
    with group_of(backend) as rank:
        size = dist.get_world_size()
        total, reduced, own = (noise(rank, floats) for _ in range(3))
        part = torch.empty(floats // size)
        dist.all_reduce(total)
        dist.reduce(reduced, 3)
        if rank != 3:
            assert torch.equal(reduced, own)
        dist.broadcast(reduced, 3)
        dist.reduce_scatter_tensor(part, own)
        joined = torch.empty(floats)
        dist.all_gather_into_tensor(joined, part)
    return [digest(total), digest(reduced), digest(joined)]


def reshaped(backend: str) -> list[list[float]]:
    """The sum of six numbers that each rank has in another shape."""
    with group_of(backend) as rank:
        own = torch.arange(6.0).reshape([(2, 3), (3, 2)][rank])
        dist.all_reduce(own)
        return own.tolist()


def left_messages(backend: str) -> list[float]:
    """Large messages both ways that nobody reads yet, a call of another group; then they are."""
    with group_of(backend) as rank:
        other = dist.new_group([0, 1], timeout=LIMIT)
        peer, size = 1 - rank, 3_000_000
        for tag in (1, 2):
            sent = torch.full((size,), 10.0 * rank + tag)
            dist.send(sent, peer, tag=tag)
            sent.zero_()
        total = torch.full((size,), 1.0)
        dist.all_reduce(total, group=other)
        dist.all_reduce(total)
        found = [total.min().item(), total.max().item()]
        for tag in (2, 1):
            came = torch.zeros(size)
            dist.recv(came, None if tag == 1 else peer, tag=tag)
            found += [came.min().item(), came.max().item()]
    return found
