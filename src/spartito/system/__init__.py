"""The system that this process runs on: what only Linux has, and what stands for it elsewhere.

`linux` and `portable` have the same functions, and this package shows those of one of them:
``portable`` needs POSIX and psutil, and runs on Linux too with ``SPARTITO_PORTABLE=1``. What only
shared memory needs is in `shared`, and nothing stands for it: ask `shares_memory` first.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from spartito.errors import UserError

ENV_PORTABLE = "SPARTITO_PORTABLE"
"""Set to 1, Linux is used as any other POSIX system."""

IS_MAC = sys.platform == "darwin"
IS_LINUX = sys.platform == "linux" and os.environ.get(ENV_PORTABLE, "") != "1"

if not TYPE_CHECKING and IS_LINUX:
    from spartito.system.linux import *  # noqa: F403
else:
    from spartito.system.portable import *  # noqa: F403


def check_platform() -> None:
    """See that Spartito knows this system.

    Raises:
        UserError: It is none of POSIX, or ``SPARTITO_PORTABLE`` is neither 0 nor 1.
    """
    if sys.platform == "win32":
        raise UserError(
            f"Spartito runs on Linux and macOS, and this is {sys.platform}",
            "Use WSL 2 on Windows, a container, or another machine.",
        )
    if (asked := os.environ.get(ENV_PORTABLE, "")) not in ("", "0", "1"):
        raise UserError(
            f"{ENV_PORTABLE}={asked!r} is neither 0 nor 1",
            "1 leaves out what only Linux has; leave it unset else.",
        )


def check_linux(what: str) -> None:
    """Refuse what only Linux can do.

    Args:
        what: Its name for the user.

    Raises:
        UserError: This is another system, or is used as one.
    """
    if not IS_LINUX:
        raise UserError(
            f"{what} needs Linux, and this is {sys.platform}"
            + (f" with {ENV_PORTABLE}=1" if sys.platform == "linux" else ""),
            "Run it on a Linux machine or in a container.",
        )
