"""Tells torch about the backend ``spartito`` of ``torch.distributed``.

torch calls `register` when it is imported, in every program: so this package imports nothing of
Spartito before a group is made.
"""

from __future__ import annotations

import sys
from typing import Any


def register() -> None:
    """Register the backend with ``torch.distributed``. May be called again."""
    import torch.distributed as dist

    if dist.is_available() and "SPARTITO" not in dist.Backend._plugins:
        dist.Backend.register_backend("spartito", _make, extended_api=True, devices=["cpu"])


def _make(options: Any, _: Any) -> Any:
    from spartito.backend.group import connect

    # torch does not say for which devices it asks; what it makes of the name is in its frame.
    asked = sys._getframe(1).f_locals.get("backend_config")
    devices = asked.get_device_backend_map() if asked else {"cpu": "spartito"}
    return connect(options, devices)
