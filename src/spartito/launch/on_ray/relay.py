"""Stands for a task of a Ray cluster: a process that prints what it prints, and ends as it ends.

The supervisor watches over processes. This one is run as a file, without Spartito, so that it
starts at once: ``python -S relay.py SOCKET INDEX``. By the socket come frames (a stream and a
length, then bytes for this stream; stream 0 says how the task ended), and signals go as lines.
"""

import os
import resource
import signal
import socket
import struct
import sys
from contextlib import suppress

HEAD = struct.Struct("!Bi")
END = 0
PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGTSTP", "SIGCONT")


def main(path: str, index: str) -> int:
    """Print what comes until the end does; returns the task's exit code, or falls by its signal."""
    numbers = [getattr(signal, name) for name in PASSED_ON]
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # until they can be passed on
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(f"{index}\n".encode())

    def pass_on(number: int, _: object) -> None:
        with suppress(OSError):  # the task has ended
            connection.sendall(b"%d\n" % number)

    for number in numbers:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    stream = connection.makefile("rb")
    while len(head := stream.read(HEAD.size)) == HEAD.size:
        target, value = HEAD.unpack(head)
        if target == END:
            for number in numbers:  # Python would have them end it, or stop it, on its way out
                signal.signal(number, signal.SIG_IGN)
            return value if value >= 0 else fall(-value)
        rest = memoryview(stream.read(value))
        while rest:
            rest = rest[os.write(target, rest) :]
    return fall(signal.SIGHUP)


def fall(number: int) -> int:
    """End by this signal, without a core dump."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
