"""One replica: the case that all others are compared with."""

from __future__ import annotations

from spartito.steps.synchronous import SynchronousStep


class OneDeviceStep(SynchronousStep):
    """What a task does of each step under `OneDeviceStrategy`."""

    name = "one_device"
