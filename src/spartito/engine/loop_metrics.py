"""Metrics of torchmetrics in a loop of the user's own: of all data shards, as under DDP.

By itself torchmetrics asks torch's process group, which most strategies have none of: each task
would show the figure of its own examples. Where there is one, tasks that share a model and have
the same examples would count them several times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any
from weakref import WeakMethod

from torch import Tensor

from spartito.collectives.collective import Collective

_open: list[WeakMethod[Callable[[], Collective]]] = []


def watch(data: Callable[[], Collective]) -> None:
    """Have metrics computed over the data shards of a strategy, until it is closed.

    Args:
        data: A method, which is not kept alive; it returns the group of the data shards.
    """
    _open.append(WeakMethod(data))


def forget(data: Callable[[], Collective]) -> None:
    """Leave metrics to those who were watched before.

    Args:
        data: What `watch` was given.
    """
    _open[:] = [each for each in _open if each() not in (None, data)]


def install() -> None:
    """Do so from now on, if torchmetrics is imported."""
    if "torchmetrics" in sys.modules:
        _install()


@cache
def _install() -> None:
    from torchmetrics import Metric

    plain: Any = Metric.sync

    @wraps(plain)
    def sync(
        self: Any,
        dist_sync_fn: Any = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Any = None,
    ) -> None:
        given = dist_sync_fn is not None or process_group is not None
        group = None if given else _newest()
        if group is None or group.world_size == 1:
            plain(self, dist_sync_fn, process_group, should_sync, distributed_available)
            return

        def gathered(state: Tensor, group: object, among: Collective = group) -> list[Tensor]:
            state = state.detach()
            return among.all_gather_rows(state) if state.dim() else among.all_gather(state)

        plain(self, gathered, None, should_sync, lambda: True)

    Metric.sync = sync  # type: ignore[method-assign]


def _newest() -> Collective | None:
    """The data shards of the strategy that was prepared last and is there."""
    for each in reversed(_open):
        if (data := each()) is not None:
            return data()
    return None
