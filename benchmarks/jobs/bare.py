"""A divided update with nothing around it: the least that two replicas of one machine can pay.

What `engine.sliced_update` does, for one model, one optimizer and two processes alone: no checks,
no piggybacked scalars, no data, metrics or callbacks, no names for the lost. What Spartito adds is
the difference; what is missing to no communication is the price of meeting twice in a step.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.jobs.plain import Work

PAGE = 4096


def stepper(work: Work, rank: int) -> Callable[[], None]:
    """A function that makes one step; both processes call it, after `init_process_group`."""
    parameters: list[Tensor] = list(work.model.parameters())
    numel = sum(parameter.numel() for parameter in parameters)
    path = Path(f"/dev/shm/bare-{os.environ['MASTER_PORT']}")
    memory = _mapped(path, PAGE + 4 * 4 * numel, rank)
    came = memoryview(memory).cast("q")
    rows = torch.frombuffer(memory, dtype=torch.float32, offset=PAGE).view(4, numel)
    half = numel // 2 // 64 * 64
    own = slice(0, half) if rank == 0 else slice(half, numel)
    foreign = slice(half, numel) if rank == 0 else slice(0, half)
    values = _sections(parameters, [p.detach() for p in parameters])
    mine, theirs = values(own), values(foreign)
    sent, received = _cut(rows[rank], theirs), _cut(rows[1 - rank], mine)
    result, results = _cut(rows[2], mine), _cut(rows[2], theirs)
    means = [[torch.zeros_like(t) for t in _views(mine)] for _ in range(2)]
    steps = [torch.zeros(()) for _ in mine]
    targets, copies, one = _views(mine), _views(theirs), torch.tensor(1.0)
    batches, done = cycle(work.ready(rank, 2)), 0
    gradient = torch.tensor(0.5)

    def meet() -> None:
        nonlocal done
        done += 1
        came[rank * 8] = done
        while came[8 - rank * 8] < done:
            os.sched_yield()

    def step() -> None:
        x, y = next(batches)
        work.loss(work.model(x), y).backward(gradient)
        grads = [parameter.grad for parameter in parameters]
        torch._foreach_copy_(sent, [_part(grads, section) for section in theirs])
        meet()
        sums = [_part(grads, section) for section in mine]
        torch._foreach_add_(sums, received)
        torch._foreach_add_(steps, one)
        torch._fused_adam_(
            targets, sums, *means, [], steps, lr=1e-3, beta1=0.9, beta2=0.999,
            weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # type: ignore[call-overload] # fmt: skip
        torch._foreach_copy_(result, targets)
        meet()
        torch._foreach_copy_(copies, results)
        for parameter in parameters:
            parameter.grad = None

    return step


Part = tuple[int, int, int, int, Tensor]
"""Tensor number, first and last element, where it begins in the row, and the values."""


def _mapped(path: Path, size: int, rank: int) -> mmap.mmap:
    if rank == 0:
        path.write_bytes(bytes(size))
    dist.barrier()
    with path.open("r+b") as file:
        found = mmap.mmap(file.fileno(), size)
    dist.barrier()
    path.unlink(missing_ok=True)
    return found


def _sections(parameters: list[Tensor], values: list[Tensor]) -> Callable[[slice], list[Part]]:
    def within(wanted: slice) -> list[Part]:
        found, first = [], 0
        for number, value in enumerate(values):
            begin, end = max(first, wanted.start), min(first + value.numel(), wanted.stop)
            if begin < end:
                flat = value.view(-1)[begin - first : end - first]
                found.append((number, begin - first, end - first, begin, flat))
            first += value.numel()
        return found

    return within


def _views(parts: list[Part]) -> list[Tensor]:
    return [part[4] for part in parts]


def _cut(row: Tensor, parts: list[Part]) -> list[Tensor]:
    return [row[at : at + stop - start] for _, start, stop, at, _ in parts]


def _part(grads: list[Tensor | None], part: Part) -> Tensor:
    number, start, stop, _, _ = part
    grad = grads[number]
    assert grad is not None
    return grad.view(-1)[start:stop]
