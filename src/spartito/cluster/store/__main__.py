"""Keep a store, for launchers and for containers.

python -m spartito.cluster.store HOST DESCRIPTOR: at a socket that is open already, until standard
input ends; its first line is the secret of the job, empty where it has none.
python -m spartito.cluster.store HOST:PORT JOURNAL: at a port, until SIGTERM, with what a file
has of one that was here before.
HOST is what the tasks call this machine: where that is no loopback, the store encrypts.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import closing
from pathlib import Path

from spartito.cluster.store.journal import Journal
from spartito.cluster.store.server import Server
from spartito.names import ENV_SECRET
from spartito.wire.addresses import is_loopback, split_address
from spartito.wire.listening import bound
from spartito.wire.secret import key_at
from spartito.wire.streams import Socket

ENDING = (signal.SIGINT, signal.SIGTERM)


def main() -> None:
    """Keep it."""
    where, what = sys.argv[1:]
    if not what.isdigit():
        host, port = split_address(where)
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # in the server's thread too
        listener = bound(host if is_loopback(host) else "", port)
        journal = Journal(Path(what))
        with closing(Server(listener, key_at(host), "the store", journal=journal)):
            signal.sigwait(ENDING)
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that is for the launcher, which ends us
    listener = Socket(fileno=int(what))
    env = {**os.environ, ENV_SECRET: sys.stdin.readline()}
    with closing(Server(listener, key_at(where, env), "the launcher")):
        sys.stdin.read()


if __name__ == "__main__":
    main()
