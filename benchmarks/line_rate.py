"""What comes through the lines of ``--link``, one way, as a part of their rate."""

from __future__ import annotations

import statistics
import subprocess
import sys

from benchmarks.common import Figure, announce, conclude, parser, progress
from spartito.launch.lines.line import Link
from spartito.launch.lines.network import Machine, NoNamespacesError, network

PORT = 5001
RATES = ("10mbit", "100mbit", "300mbit", "1gbit", "2.5gbit", "10gbit")
SECONDS = 0.25
"""That all bytes take at the rate of the line, about."""
BLOCK = 1 << 16
LEAST = 0.9
"""1448 of 1514 bytes are the sender's own: 0.956."""
TAKES = f"""
import socket, time
listener = socket.create_server(("", {PORT}))
print("ready", flush=True)
peer, _ = listener.accept()
total, block = 0, bytearray({BLOCK})
began = None
while (count := peer.recv_into(block)):
    began = began or time.perf_counter()
    total += count
print(total * 8 / (time.perf_counter() - began))
"""
SENDS = f"""
import socket, sys
peer = socket.create_connection((sys.argv[1], {PORT}))
for _ in range(int(sys.argv[2])):
    peer.sendall(bytes({BLOCK}))
"""


def main() -> None:
    """Print the parts of all rates."""
    assert __doc__ is not None
    options = parser(__doc__, rounds=3)
    given = options.parse_args()
    here = announce(__doc__)
    found: dict[str, list[float]] = {rate: [] for rate in RATES}
    try:
        for number in range(given.rounds):
            for rate, parts in found.items():
                parts.append(part(Link.read(rate)))
                progress(number, given.rounds, {rate: parts[-1]}, "of the rate")
    except NoNamespacesError as error:
        sys.exit(str(error))
    figures = [Figure(rate, statistics.median(parts), LEAST) for rate, parts in found.items()]
    conclude(here, figures, given.json, parts=found)


def part(link: Link) -> float:
    """The part of a line's rate that one machine gets through to another."""
    with network("takes", "sends", needs=()) as machines:
        for machine in machines:
            machine.slow_down(link)
        takes, sends = machines
        return rate(takes, sends, max(4, round(link.rate * SECONDS / 8 / BLOCK))) / link.rate


def rate(takes: Machine, sends: Machine, blocks: int) -> float:
    """Bits a second that arrive."""
    words = [*takes.enters, sys.executable, "-c", TAKES]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        words = [*sends.enters, sys.executable, "-c", SENDS, takes.address, str(blocks)]
        subprocess.run(words, check=True)
        return float(program.stdout.read())


if __name__ == "__main__":
    main()
