"""What torch asks a process group about itself.

Only rank and size go to torch's class: with more it takes the groups for one of its own, and asks
its parts in C++ about the rest.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spartito.backend.work import Done

_ProcessGroup: Any = dist.ProcessGroup
"""torch's class, whose methods have other names and arguments in each of its releases."""


class Identity(_ProcessGroup):  # type: ignore[misc]
    """The part of a group that says who it is.

    Args:
        rank: Our rank in the group.
        size: The number of its ranks.
        store: The store of the group.
        timeout: How long a wait for another rank may take.
    """

    def __init__(self, rank: int, size: int, store: dist.Store, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._store = store
        self._timeout = timeout
        self._group_name = self._group_desc = ""

    def rank(self) -> int:
        """Our rank in the group."""
        return self._rank

    def size(self) -> int:
        """The number of ranks."""
        return self._size

    getRank, getSize = rank, size

    def name(self) -> str:
        """The name of the backend."""
        return "spartito"

    getBackendName = _get_backend_name = name

    @property
    def group_name(self) -> str:
        """The name that torch gave the group."""
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_desc(self) -> str:
        """What torch or the user says of the group."""
        return self._group_desc

    def _set_group_desc(self, desc: str) -> None:
        self._group_desc = desc

    def getGroupName(self) -> str:
        """As `group_name`, for C++."""
        return self._group_name

    def setGroupName(self, name: str) -> None:
        """As `group_name`, for C++."""
        self._group_name = name

    def getGroupDesc(self) -> str:
        """As `group_desc`, for C++."""
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:
        """As `group_desc`, for C++."""
        self._group_desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def get_group_store(self) -> dist.Store:
        """The store of the group."""
        return self._store

    @property
    def supports_splitting(self) -> bool:
        """False: a group is made anew from its ranks."""
        return False

    @property
    def supports_coalescing(self) -> bool:
        """False: calls are complete when they return."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long a wait for another rank may take."""
        self._timeout = timeout

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def _start_coalescing(self, device: torch.device) -> None:
        pass

    def _end_coalescing(self, device: torch.device) -> Done:
        return Done()

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        pass
