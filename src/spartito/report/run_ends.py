"""How a training ended, as ``config.json`` of its run folder says it under ``fit``, ``end``.

Nothing stands there where the process left in the middle.
"""

from __future__ import annotations

COMPLETE = "complete"
"""All epochs are done."""
STOPPED = "stopped"
"""A callback ended it."""
NOT_FINITE = "not finite"
"""``Trainer(on_nonfinite="stop")`` ended it."""
