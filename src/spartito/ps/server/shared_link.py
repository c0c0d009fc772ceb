"""Going on by shared memory with a task that is on the server's machine."""

from __future__ import annotations

import time

import torch
from msgspec.structs import replace
from torch import Tensor

from spartito.collectives.memory.segment import Segment
from spartito.ps.protocol.layout import Span
from spartito.ps.protocol.memory import LOCAL, areas
from spartito.ps.protocol.messages import Request, Welcome
from spartito.ps.protocol.runtime import Channel
from spartito.system.files import memory_folders
from spartito.wire.frames import Gone, ProtocolError, Wire
from spartito.wire.handshake import UnknownPeerError, challenge
from spartito.wire.limits import GREETING_SECONDS
from spartito.wire.listening import listen_here
from spartito.wire.secret import Key
from spartito.wire.streams import Socket


def share(wire: Channel, span: Span, welcome: Welcome, key: Key) -> tuple[Channel, Tensor, Tensor]:
    """Map a segment with the task, and go on by a socket of this machine alone.

    Returns that, where gradients come and where values go; ``wire`` is closed.
    """
    push_at, pull_at, size = areas(span)
    segment = Segment.create(size, memory_folders())
    path = segment.path.with_suffix(".sock")
    try:
        with listen_here(path) as local:
            local.settimeout(GREETING_SECONDS)
            wire.send(replace(welcome, segment=str(segment.path), socket=str(path)))
            sock, _ = local.accept()
        _challenge(sock, key)
    finally:
        segment.path.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    wire.close()
    inbox = segment.tensor(push_at, span.size, torch.uint8)
    return Wire(sock, Request), inbox, segment.tensor(pull_at, span.size, torch.uint8)


def _challenge(sock: Socket, key: Key) -> None:
    """Have the task prove once more who it is; `Gone` if it leaves instead."""
    try:
        challenge(sock, key, LOCAL, time.monotonic() + GREETING_SECONDS)
    except BaseException as error:
        sock.close()
        if isinstance(error, UnknownPeerError):
            raise ProtocolError(str(error)) from error
        if isinstance(error, OSError):
            raise Gone(*error.args) from error
        raise
