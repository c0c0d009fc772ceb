"""One replica: the case that all others are compared with."""

from __future__ import annotations

from dataclasses import dataclass

from spartito.strategies.declaration import Strategy


@dataclass(frozen=True, eq=False)
class OneDeviceStrategy(Strategy):
    """Everything on one device of one process."""

    name = "one_device"
    implementation = "spartito.steps.one_device:OneDeviceStep"
