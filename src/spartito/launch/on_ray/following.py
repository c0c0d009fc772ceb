"""The connections between the actors of a job and the processes here that stand for them."""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from spartito.launch.hosts.client import FATAL
from spartito.launch.on_ray import relay
from spartito.launch.on_ray.actor import Output
from spartito.wire.listening import listen_here
from spartito.wire.streams import Socket, disconnect


class Following:
    """A socket where each relay asks for its task, which then starts on its node.

    Args:
        tasks: the actors of the job, in order.
        start: starts the task with this index, on its actor.
        get: waits for what an actor replies.
    """

    def __init__(
        self, tasks: Sequence[Any], start: Callable[[int], Any], get: Callable[[Any], Any]
    ) -> None:
        self._tasks, self._start, self._get = tasks, start, get
        self._folder = tempfile.TemporaryDirectory(prefix="spartito-")
        path = Path(self._folder.name) / "socket"
        self._path, self._listener = str(path), listen_here(path, len(tasks))

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        disconnect(self._listener)  # wakes the thread
        self._listener.close()
        self._folder.cleanup()

    @property
    def private(self) -> str:
        """The folder with the socket."""
        return self._folder.name

    def command(self, index: int) -> list[str]:
        """What stands here for the task with this index."""
        return [sys.executable, "-S", "-E", str(relay.__file__), self._path, str(index)]

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._follow, args=(connection,), daemon=True).start()

    def _follow(self, connection: Socket) -> None:
        """Start the task of this relay, and pass on what it prints until it ends."""
        lines = connection.makefile("rb")
        index = int(lines.readline())
        actor = self._tasks[index]
        with suppress(OSError), connection:  # the relay is gone, and so is the job
            try:
                self._get(self._start(index))
                pass_on = threading.Thread(target=_signal, args=(actor, lines), daemon=True)
                pass_on.start()
                while True:
                    came: Output = self._get(actor.read.remote())
                    for stream, data in ((1, came.out), (2, came.err)):
                        if data:
                            connection.sendall(relay.HEAD.pack(stream, len(data)) + data)
                    if came.code is not None:
                        code = came.code
                        end = 128 - code if code - 128 in FATAL else code
                        connection.sendall(relay.HEAD.pack(relay.END, end))
                        return
            except OSError:
                raise
            except Exception as error:  # of Ray: its actor or its node is gone
                why = (str(error).strip().splitlines() or [type(error).__name__])[0]
                text = f"spartito: its actor is lost: {why}\n".encode()
                connection.sendall(relay.HEAD.pack(2, len(text)) + text)
                connection.sendall(relay.HEAD.pack(relay.END, -signal.SIGHUP))


def _signal(actor: Any, lines: Any) -> None:
    with suppress(Exception):  # the relay is gone, or the actor
        for line in lines:
            actor.signal.remote(int(line))
