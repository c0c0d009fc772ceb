"""One replica: the case that all others are compared with."""

from __future__ import annotations

from spartito.steps.synchronous import SynchronousStep


class OneDeviceStep(SynchronousStep):
    """Everything on one device of one process."""

    name = "one_device"
