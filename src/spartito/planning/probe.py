"""Two processes of this machine exchange for a few seconds: what a byte costs, and a meeting.

``python probe.py FILE``, with the variables of a job of two workers; rank 0 writes the file.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

LIMIT = 60.0
SIZES = {1 << 8: 200, 1 << 18: 20, 1 << 22: 3}
"""Floats of a sum, and how often each is made in a round."""
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
    """Measure; rank 0 writes what came out."""
    import torch
    from torch.distributed import TCPStore

    from spartito.collectives.shared_memory import Cores, SharedMemoryCollective
    from spartito.collectives.store import Membership
    from spartito.collectives.tcp import SocketCollective
    from spartito.collectives.torch_store import OfTorch
    from spartito.system import shares_memory
    from spartito.system.capacity import cgroup_quota
    from spartito.wire.addresses import DRAWN, Endpoint

    torch.set_num_threads(1)
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
    found: dict[str, Any] = {way: _sums(each) for way, each in ways.items()}
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
        found |= {"contention": max(1.0, alone / beside), "disk": _disk(), "codes": _codes()}
        Path(sys.argv[1]).write_text(json.dumps(found))


def _sums(group: Any) -> list[list[float]]:
    """Bytes of each size, and the seconds that a sum of them takes, as in a step."""
    import torch

    found = []
    for floats, repeats in SIZES.items():
        gradient = torch.zeros(floats)
        reducer = group.reducer(floats, torch.float32, torch.device("cpu"))

        def call(reducer: Any = reducer, gradient: Any = gradient) -> None:
            reducer.input.copy_(gradient)
            reducer.reduce((1.0, 0.0), 2.0)

        call()
        times = [_seconds(call, repeats, group.barrier) for _ in range(ROUNDS)]
        found.append([floats * 4, min(times)])
    return found


def _seconds(call: Callable[[], object], repeats: int, meet: Callable[[], object]) -> float:
    meet()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats


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

    from spartito.engine.compression import choose

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
