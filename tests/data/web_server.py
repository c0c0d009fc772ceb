"""A web server on loopback that gives ranges of files, and fails as it is told to."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Fault = Callable[[int], str | None]
"""From the number of a request for content, from 1, to what goes wrong with it, or None."""


@dataclass
class WebServer:
    """What it serves, and what it was asked for.

    Attributes:
        folder: The files.
        fault: Decides what goes wrong: "500", "429", "403", "cut", "short" (fewer bytes than
            asked for, well-formed), "changed" (another content).
        delay: Seconds before each reply.
        ranges: How often each (name, start, stop) was sent whole.
    """

    folder: Path
    fault: Fault = lambda number: None
    delay: float = 0.0
    ranges: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    requests: int = 0
    port: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def bytes(self) -> int:
        """All that was sent whole."""
        return sum((stop - start) * n for (_, start, stop), n in self.ranges.items())


@contextmanager
def serving(folder: Path, fault: Fault = lambda number: None) -> Iterator[WebServer]:
    """A server of the files in ``folder``, for the time of the block."""
    about = WebServer(folder, fault)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            """Say nothing."""

        def do_HEAD(self) -> None:
            self._reply(False)

        def do_GET(self) -> None:
            self._reply(True)

        def _reply(self, has_content: bool) -> None:
            name = self.path.lstrip("/")
            file = about.folder / name
            time.sleep(about.delay)
            if not file.is_file():
                return self._status(404)
            size = file.stat().st_size
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            start, stop = (int(asked[1]), min(int(asked[2]) + 1, size)) if asked else (0, size)
            with about.lock:
                about.requests += has_content
                wrong = about.fault(about.requests) if has_content else None
            if wrong in ("500", "429", "403"):
                return self._status(int(wrong))
            with open(file, "rb") as opened:
                opened.seek(start)
                data = opened.read(stop - start) if has_content else b""
            if wrong == "changed":
                data = bytes(byte ^ 255 for byte in data)
            if wrong == "short":
                data, stop = data[:-1], stop - 1
            self.send_response(206 if asked else 200)
            length = len(data) if has_content else stop - start
            self.send_header("Content-Length", str(length))
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", f'"{file.stat().st_mtime_ns}"')
            self.end_headers()
            if not has_content:
                return None
            if wrong == "cut":
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
                return None
            if wrong is None:
                with about.lock:  # before it is sent: who has read it may look
                    about.ranges[name, start, stop] += 1
            self.wfile.write(data)
            return None

        def _status(self, code: int) -> None:
            self.send_response(code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # of 5, others wait a second for their connection

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    about.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield about
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
