"""Decoders of messages, made by one thread at a time.

What msgspec knows of a type it finds out when the first decoder of it is made, and keeps with the
type from the beginning on, half known. A second thread that makes one meanwhile takes that, and
its first message ends the process by SIGSEGV.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

Binary: TypeAlias = msgspec.msgpack.Decoder[Any]

_turn = threading.Lock()
_binary: dict[Any, Binary] = {}


def msgpack_decoder(kind: Any, hook: Callable[[type, Any], Any] | None = None) -> Binary:
    """The decoder of msgpack for a type, which all threads may use at once.

    Args:
        kind: A `msgspec.Struct`, or a union of some.
        hook: Makes what msgspec does not know, of a type and a plain value.

    Returns:
        The same one each time.
    """
    with _turn:
        if (kind, hook) not in _binary:
            _binary[kind, hook] = msgspec.msgpack.Decoder(kind, dec_hook=hook)
        return _binary[kind, hook]
