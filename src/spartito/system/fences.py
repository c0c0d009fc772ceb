"""Fences between what a process writes into shared memory and the flag by which it says so.

Who writes calls `release` before it stores the flag, and who reads calls `acquire` after it has
seen the flag:

    data[...] = values                   while flag < step: wait
    release(); flag = step               acquire(); use(data)

The first also keeps reads before the flag that says that others may write there again.

x86-64 keeps all of that in order by itself, so both are nothing there. ARM does not, and Python has
no fences; `atomic_thread_fence` of C11 is a function of libatomic, one instruction (``dmb ish``).
A lock that is taken and given back is none on ARM: what is before and behind it may be reordered
inside.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from spartito.errors import SpartitoError

Fence = Callable[[], object]

X86 = frozenset({"x86_64", "amd64"})
ARM = frozenset({"aarch64", "arm64"})
LIBRARY = "libatomic.so.1"
ENV_ARM = "SPARTITO_ARM_MEMORY"
"""Set to 1, tasks share memory on ARM, on which no fence of ours has been run yet."""
_ACQUIRE, _RELEASE, _ALL = 2, 3, 5
"""``memory_order`` of C11."""


@dataclass(frozen=True, slots=True)
class Fences:
    """The fences of a processor.

    Attributes:
        release: No load or store before it is seen after a store behind it.
        acquire: No load or store behind it is seen before a load in front of it.
        full: Both, and no load behind it is done before a store in front of it is seen.
    """

    release: Fence
    acquire: Fence
    full: Fence


def fences_of(machine: str) -> Fences | None:
    """The fences of a kind of processor.

    Args:
        machine: As `platform.machine` calls it.

    Returns:
        None where we have none: memory is not shared there.
    """
    if machine.lower() in X86:
        return Fences(_nothing, _nothing, _locked)
    asked = os.environ.get(ENV_ARM) == "1"
    if machine.lower() in ARM and asked and (fence := _of_c11()) is not None:
        return Fences(*(partial(fence, order) for order in (_RELEASE, _ACQUIRE, _ALL)))
    return None


def why_none(machine: str) -> str:
    """Why a kind of processor has no fences.

    Args:
        machine: As `platform.machine` calls it.
    """
    if machine.lower() not in ARM:
        return f"memory is shared on x86-64 and ARM only, and this is {machine}"
    if os.environ.get(ENV_ARM) != "1":
        return f"memory is shared on {machine} only where {ENV_ARM}=1 asks for it, untried as it is"
    return f"memory is shared on {machine} where {LIBRARY} (package libatomic1) is, and it is not"


def _nothing() -> None:
    """The processor keeps the order."""


def _locked() -> None:
    """A lock is an instruction that waits until all stores are seen."""
    with _lock:
        pass


_lock = threading.Lock()


def _of_c11() -> Callable[[int], object] | None:
    """``atomic_thread_fence``; called so that the interpreter is not given away."""
    try:
        fence: Callable[[int], object] = ctypes.PyDLL(LIBRARY).atomic_thread_fence
    except (OSError, AttributeError):
        return None
    return fence


def _unknown() -> None:
    raise SpartitoError(why_none(platform.machine()), "Take communication='sockets'.")


_here = fences_of(platform.machine()) or Fences(_unknown, _unknown, _unknown)
release, acquire, full = _here.release, _here.acquire, _here.full
