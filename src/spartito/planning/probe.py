"""Processes of this machine exchange for some seconds: what a byte costs, and what strategies do.

``python -m spartito.planning.probe FILE`` reads a line ``TENSORS BYTES LINES`` when it may begin;
``LINES`` is 1 where strategies are tried by sockets, too.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from spartito.launch.processes.local import SETTINGS, Position, environments
from spartito.launch.processes.roles import HOST, Roles, task_environments
from spartito.notes import note
from spartito.planning import reference
from spartito.wire.ports import free_ports

LOADED = "spartito.training.trainer"
"""What tasks need, which are forks of a process that has it."""
LIMIT = 60.0
SMALL, LEAST, MOST = 1 << 10, 1 << 20, 1 << 26
"""Bytes of a small sum, and between which the other one is, which has those of the model: the more
a sum has, the more a byte takes, as less of it is in the caches."""
MOVED, WORK = 1 << 24, 1 << 23
"""Bytes that all sums of a round have together, and that are changed before each: more than a core
has in its own caches."""
ROUNDS = 5
"""Of which the quickest counts: other programs are no part of an exchange."""
COMPUTES = 0.1
"""Seconds for which a process computes alone, then beside the other, in each round."""
CODES = ("8bit", "4bit")
CODED = 1 << 20
"""Numbers that are packed and unpacked."""
WRITTEN = 32 << 20
"""Bytes that are written to see how fast a checkpoint is."""


def main() -> None:
    """Measure, and write what came out."""
    import torch

    import_module(LOADED)
    file, told = Path(sys.argv[1]), sys.stdin.readline()
    if not told:  # nobody wants to know any more
        return
    tensors, nbytes, lines = map(int, told.split())
    shape = reference.Shape.like(tensors, nbytes)
    torch.set_num_threads(1)
    found = together(partial(_exchanges, min(max(LEAST, nbytes), MOST)), 2)
    note("profiles %s", shape)
    found["reference"] = together(partial(reference.profiled, shape), 1)
    between = reference.BETWEEN if lines else ()
    for name, tried in (("trials", reference.TRIED), ("between", between)):
        found[name] = {}
        for number, text in enumerate(tried, 1):
            note("%s: trains it under %s (%d of %d)", name, text, number, len(tried))
            job = partial(reference.trained, text, shape, name == "between")
            try:
                found[name][text] = together(job, *reference.tasks_of(text))
            except RuntimeError as error:
                note("%s: %s; its own code is taken for nothing", text, error)
    file.write_text(json.dumps(found))


def together(task: Callable[[], Any], workers: int, servers: int = 0) -> Any:
    """Run a job of forks on this machine.

    Args:
        task: What each does.
        workers: How many there are.
        servers: Parameter servers beside them.

    Returns:
        What the first one returned.

    Raises:
        RuntimeError: It ended otherwise, or not in time; what it said is on stderr.
    """
    result, wrote = os.pipe()
    pids: list[int] = []
    with ExitStack() as held:
        ports = free_ports(workers + servers, held=held)
        base = dict(os.environ) | SETTINGS
        told = (
            task_environments(base, Roles(workers, servers), ports)
            if servers
            else environments(base, Position(0, 1, HOST, ports[0]), workers)
        )
        try:
            for rank, environment in enumerate(told):
                pid = os.fork()
                if not pid:
                    _run(task, environment, wrote, tells=rank == 0)
                pids.append(pid)
            os.close(wrote)
            text = _read(result, LIMIT)
        finally:
            os.close(result)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    if not text:
        raise RuntimeError(f"a job of {len(told)} tasks on this machine did not end well")
    return json.loads(text)


def _read(file: int, limit: float) -> bytes:
    """What is written until the other end closes; nothing where that takes too long."""
    end, parts = time.monotonic() + limit, b""
    while select.select([file], [], [], max(0.0, end - time.monotonic()))[0]:
        part = os.read(file, 1 << 16)
        if not part:
            return parts
        parts += part
    return b""


def _run(
    task: Callable[[], Any], environment: Mapping[str, str], wrote: int, tells: bool
) -> NoReturn:
    """In a fork: be the task; one of them tells what came out."""
    if not tells:
        os.close(wrote)
    code = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        found = task()
        if tells:
            os.write(wrote, json.dumps(found).encode())
        code = 0
    except SystemExit:  # a server has served
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _exchanges(nbytes: int) -> dict[str, Any]:
    """What two tasks measure, with sums of so many bytes; the first one tells."""
    from torch.distributed import TCPStore

    from spartito.collectives.membership.store import Membership
    from spartito.collectives.membership.torch_store import OfTorch
    from spartito.collectives.memory.shared_memory import Cores, SharedMemoryCollective
    from spartito.collectives.sockets.tcp import SocketCollective
    from spartito.system import shares_memory
    from spartito.system.capacity import cgroup_quota
    from spartito.wire.addresses import DRAWN, Endpoint

    rank, host = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
    port, limit = int(os.environ["MASTER_PORT"]), timedelta(seconds=LIMIT)
    store = TCPStore(host, port, is_master=rank == 0, timeout=limit)
    names = ["worker 0", "worker 1"]
    group = Membership(rank, names, OfTorch(store), LIMIT)
    sockets = SocketCollective(group.under("sockets"), Endpoint(names[rank], host, (DRAWN,)))
    ways: dict[str, Any] = {"sockets": sockets}
    if shares_memory():
        spins = Cores.own().suffice([Cores.own()] * 2, cgroup_quota())
        ways["memory"] = SharedMemoryCollective(group.under("memory"), spins)
    found: dict[str, Any] = {way: _sums(each, nbytes) for way, each in ways.items()}
    if rank == 0:
        alone = _computed()
        store.set("alone", "done")
    else:
        store.wait(["alone"])
    sockets.barrier()
    beside = _computed()
    for each in ways.values():
        each.barrier()
        each.close()
    if rank == 0:
        found |= {"contention": max(0.0, alone / beside - 1), "disk": _disk(), "codes": _codes()}
        found["copy"] = _copied(nbytes)
    return found


def _sums(group: Any, nbytes: int) -> list[list[float]]:
    """Few bytes and so many, and the seconds that a sum of them takes, as in a step."""
    import torch

    found = []
    for floats in (SMALL // 4, nbytes // 4):
        repeats = min(20, 1 + MOVED // (floats * 4))
        gradient = torch.zeros(floats)
        reducer = group.reducer(floats, torch.float32, torch.device("cpu"))

        def call(reducer: Any = reducer, gradient: Any = gradient) -> None:
            reducer.input.copy_(gradient)
            reducer.reduce((1.0, 0.0), 2.0)

        call()
        times = [_seconds(call, repeats, group.barrier) for _ in range(ROUNDS)]
        found.append([floats * 4, min(times)])
    return found


def _copied(nbytes: int) -> float:
    """The seconds in which one of so many bytes is copied."""
    import torch

    source, target = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)
    repeats = 1 + MOVED // nbytes
    times = [_seconds(lambda: target.copy_(source), repeats, float) for _ in range(ROUNDS)]
    return min(times) / nbytes


def _seconds(call: Callable[[], object], repeats: int, meet: Callable[[], object]) -> float:
    """The mean of several calls, before each of which a step's work has filled the caches."""
    import torch

    work, spent = torch.zeros(WORK // 4), 0.0
    for _ in range(repeats):
        work.add_(1.0)
        meet()
        began = time.perf_counter()
        call()
        spent += time.perf_counter() - began
    return spent / repeats


def _computed() -> float:
    """How often a layer and an elementwise pass are computed in a second, in the best round."""
    import torch

    x, weight, wide = torch.ones(64, 512), torch.ones(512, 512), torch.ones(1 << 18)
    rates = []
    for _ in range(ROUNDS):
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < COMPUTES:
            torch.mm(x, weight)
            wide.mul_(1.0)
            count += 1
        rates.append(count / (time.perf_counter() - began))
    return max(rates)


def _codes() -> dict[str, dict[str, float]]:
    """By code: bytes sent for each byte of numbers, and seconds of one to pack and unpack it."""
    import torch

    from spartito.engine.gradients.compression import choose

    values, total = torch.randn(CODED), torch.zeros(CODED)
    found = {}
    for name in CODES:
        code: Any = choose(name)
        packed = code.pack(values)

        def pack(code: Any = code) -> None:
            code.pack(values.add(total))

        def unpack(code: Any = code, packed: Any = packed) -> None:
            total.add_(code.unpack(packed, CODED))

        times = [min(_seconds(call, 1, float) for _ in range(ROUNDS)) for call in (pack, unpack)]
        to_pack, to_unpack = (seconds / values.nbytes for seconds in times)
        found[name] = {
            "bytes": packed.nbytes / values.nbytes,
            "pack": to_pack,
            "unpack": to_unpack,
        }
    return found


def _disk() -> float:
    """Bytes a second that reach the disk of this folder for temporary files."""
    data = bytes(WRITTEN)
    with tempfile.TemporaryFile() as file:
        began = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return WRITTEN / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
