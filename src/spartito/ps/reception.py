"""The coordinator's door: one thread for each worker's connection."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from spartito.collectives.versions import Versions, check_versions
from spartito.errors import UserError
from spartito.log import warn
from spartito.ps.coordinator import ANSWER_SECONDS, Coordinator
from spartito.ps.wire import Gone, ProtocolError, Wire
from spartito.ps.work import (
    Answer,
    Ask,
    Beat,
    Bye,
    Hello,
    Refused,
    Take,
    ToCoordinator,
    Value,
    Welcome,
)

BEAT_SECONDS = 1.0
HELLO_SECONDS = 10.0
"""A connection that has not said who it is by then is closed."""
ACCEPT_SECONDS = 0.25  # how soon the door notices that it is closed


class Reception:
    """Lets workers in at ``listener`` until the coordinator closes."""

    def __init__(self, coordinator: Coordinator, listener: socket.socket) -> None:
        self._coordinator = coordinator
        self._listener = listener
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._talks: dict[Wire, threading.Thread] = {}
        # Several signs of life in the time after which their absence is noticed.
        self._beat = min(BEAT_SECONDS, coordinator.lease_seconds / 4)
        listener.settimeout(ACCEPT_SECONDS)
        self._door = threading.Thread(target=self._accept, name="spartito-door", daemon=True)
        self._door.start()
        coordinator.on_close(self.close)

    def close(self) -> None:
        """End all connections and let nobody in. Calling it again changes nothing."""
        self._closed.set()
        with contextlib.suppress(OSError):  # wakes the door where the system can
            self._listener.shutdown(socket.SHUT_RDWR)
        self._door.join()
        self._listener.close()
        with self._lock:
            talks = dict(self._talks)
        for wire, thread in talks.items():
            wire.close()
            thread.join()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._closed.is_set():
                    return
                warn("the coordinator cannot let a worker in: %s", error)
                time.sleep(ACCEPT_SECONDS)  # out of descriptors: some may come free
                continue
            self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        try:
            wire = Wire(sock, ToCoordinator, timeout=HELLO_SECONDS)
        except OSError:
            sock.close()  # it is gone already
            return
        thread = threading.Thread(target=self._talk, args=(wire,), daemon=True)
        with self._lock:
            self._talks[wire] = thread
        thread.start()

    def _talk(self, wire: Wire) -> None:
        try:
            hello = wire.receive()
            if not isinstance(hello, Hello):
                raise ProtocolError(f"Hello was expected, {type(hello).__name__} came")
            if self._fits(wire, hello):
                self._admit(wire, hello.worker)
        except UserError as error:
            self._refuse(wire, error)
        except ProtocolError as error:
            warn("a connection to the coordinator was closed: %s", error)
        except (Gone, TimeoutError):
            pass  # a stranger; a worker's end was told to the coordinator
        finally:
            with self._lock:
                self._talks.pop(wire)
            wire.close()

    def _fits(self, wire: Wire, hello: Hello) -> bool:
        """Whether the worker runs what we run; else it is refused, and a new job ends."""
        try:
            check_versions({"the chief": Versions.own(), f"worker {hello.worker}": hello.versions})
        except UserError as error:
            self._refuse(wire, error)
            if self._coordinator.begun:
                warn("a worker was refused: %s", error)
            else:
                self._coordinator.fail(error)
            return False
        return True

    def _admit(self, wire: Wire, worker: int) -> None:
        session = self._coordinator.enter(worker)
        lost = True
        try:
            wire.send(Welcome(self._beat, session))
            wire.timeout = None  # a silent worker is the watch's business
            lost = not self._converse(wire, worker, session)
        finally:
            self._coordinator.leave(worker, session, lost)

    def _converse(self, wire: Wire, worker: int, session: int) -> bool:
        """Answer until the worker says goodbye: True."""
        known = b""
        patience = min(ANSWER_SECONDS, self._beat)
        while True:
            message = wire.receive()
            self._coordinator.hear(worker, session)
            match message:
                case Take(stream, epoch, report, wait):
                    work = self._coordinator.take(worker, stream, epoch, report, wait, patience)
                    rates = self._coordinator.rates
                    wire.send(Answer(work, rates if rates != known else None))
                    known = rates
                case Ask(key):
                    value = self._coordinator.board.published(key, patience)
                    if value is None and self._coordinator.ended:
                        raise UserError("the job has ended", "Start a new one.")
                    wire.send(Value(value is not None), value or b"")
                case Bye():
                    return True
                case Beat():
                    pass
                case _:
                    raise ProtocolError(f"a second {type(message).__name__} came")

    def _refuse(self, wire: Wire, error: UserError) -> None:
        what, _, do = str(error).partition("\n  ")
        with contextlib.suppress(Gone, TimeoutError):  # it may not wait for the answer
            wire.send(Refused(what, do))
