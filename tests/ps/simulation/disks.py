"""What of a simulated server, or chief, outlives its process."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from spartito.errors import TaskLostError
from spartito.ps.scheduler.journal import Journal
from spartito.ps.server.counter import Counter
from spartito.ps.server.snapshot import Snapshot
from spartito.ps.server.store import Store
from tests.ps.simulation.scheduler import Process


@dataclass
class Disk:
    """What of a server outlives its process."""

    snapshot: tuple[dict[str, Tensor], dict[str, Any]] | None = None
    updates: int = 0
    log: list[list[int]] = field(default_factory=list)
    """The work items of every update that counts."""


class MemoryJournal(Journal):
    """Of a chief: what it wrote outlives it."""

    def __init__(self, records: list[bytes]) -> None:
        self._records, self.size = records, 0

    def read(self) -> list[bytes]:
        return list(self._records)

    def append(self, record: bytes) -> None:
        self._records.append(record)

    def rewrite(self, record: bytes) -> None:
        self._records[:] = [record]

    def remove(self) -> None:
        self._records.clear()


class DiskCounter(Counter):
    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    @property
    def value(self) -> int:
        return self._disk.updates

    @value.setter
    def value(self, number: int) -> None:
        self._disk.updates = number


class DiskSnapshot(Snapshot):
    def __init__(self, disk: Disk, process: Process) -> None:
        self._disk, self._process = disk, process
        self._name = process.name

    def counter(self) -> Counter:
        return DiskCounter(self._disk)

    def write(self, store: Store) -> int:
        with store.lock:
            tensors, about = store.dump()
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        store.buffers.give_back(tensors)
        self._process.sleep(self._process.simulation.random.random() * 0.2)  # it may die now
        self._disk.snapshot = kept, copy.deepcopy(about)
        version: int = about["counts"][0]
        return version

    def restore(self, store: Store, job: str) -> bool:
        if self._disk.snapshot is None or self._disk.snapshot[1]["job"] != job:
            return False
        tensors, about = self._disk.snapshot
        store.restore({name: t.clone() for name, t in tensors.items()}, copy.deepcopy(about))
        return True

    def missing(self, job: str) -> TaskLostError:
        return TaskLostError(f"{self._name} has no snapshot")

    def remove(self) -> None:
        """The log is kept for the checks."""
