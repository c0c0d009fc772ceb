"""Keep a store at a socket that is open already, until standard input ends: for launchers.

python -m spartito.cluster.store DESCRIPTOR
"""

from __future__ import annotations

import signal
import socket
import sys
from contextlib import closing

from spartito.cluster.secret import key_at
from spartito.cluster.store.server import Server


def main() -> None:
    """Keep it; Ctrl-C is for the tasks, and for the launcher, which ends us."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(fileno=int(sys.argv[1]))
    key = key_at(listener.getsockname()[0])
    with closing(Server(listener, key, "the launcher")):
        sys.stdin.read()


if __name__ == "__main__":
    main()
