"""Equal copies on the devices of one machine."""

from __future__ import annotations

from spartito.steps.synchronous import SynchronousStep


class MirroredStep(SynchronousStep):
    """What a task does of each step under `MirroredStrategy`."""

    name = "mirrored"
    _recovers = True
