"""One replica: the case that all others are compared with."""

from __future__ import annotations

from spartito.strategies.synchronous import SynchronousStrategy


class OneDeviceStrategy(SynchronousStrategy):
    """Everything on one device of one process."""

    name = "one_device"
