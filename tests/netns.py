"""Machines on one machine: network namespaces on one switch, each with shared memory of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

LIMIT = 20.0
SUBNET = "10.111.0"  # seen inside the namespaces only

MEMORY = "mount -t tmpfs tmpfs /dev/shm && echo ready && exec cat"
ENTER = 'exec nsenter --target {} --net --mount --ipc env --chdir="$PWD" "$@"'


class NoNamespacesError(Exception):
    """This machine, or our rights on it, do not allow network namespaces."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A network namespace with an address, and the process that holds its mounts and memory."""

    namespace: str
    address: str
    holder: int

    @property
    def words(self) -> tuple[str, ...]:
        """What to put before a command so that it runs on this machine."""
        return ("sh", "-c", ENTER.format(self.holder), "sh")

    def cut(self) -> None:
        """Take the machine off the network."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")

    def join(self) -> None:
        """Bring it back."""
        _ip("-n", self.namespace, "link", "set", "eth0", "up")


@contextlib.contextmanager
def network(count: int, name: str = "net") -> Iterator[list[Machine]]:
    """So many machines on one switch, gone after the block.

    The switch is in a namespace too, so that no rule of this machine's firewall meets it.
    Raises `NoNamespacesError` where this machine or our rights do not allow them.
    """
    if os.geteuid() != 0:
        raise NoNamespacesError("network namespaces need root")
    mark = f"{name}-{secrets.token_hex(3)}"
    with contextlib.ExitStack() as stack:
        try:
            switch = stack.enter_context(_namespace(f"{mark}-switch"))
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            machines = [
                stack.enter_context(_machine(switch, f"{mark}-{n}", n)) for n in range(count)
            ]
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or error
            raise NoNamespacesError(f"network namespaces cannot be made: {said}") from error
        yield machines


@contextlib.contextmanager
def _machine(switch: str, name: str, number: int) -> Iterator[Machine]:
    """A machine in port ``number`` of the switch."""
    with _namespace(name) as there:
        port, address = f"port{number}", f"{SUBNET}.{number + 1}"
        _ip("-n", there, "link", "add", "eth0", "type", "veth",
            "peer", "name", port, "netns", switch)  # fmt: skip
        _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
        _ip("-n", there, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", there, "link", "set", device, "up")
        words = ["ip", "netns", "exec", there, "unshare", "--mount", "--ipc", "sh", "-c", MEMORY]
        # It ends when its input does, so not even our own violent end leaves it.
        holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with holder:
            assert holder.stdout is not None
            if holder.stdout.readline() != b"ready\n":
                raise OSError("no mounts and memory of its own for a namespace")
            yield Machine(there, address, holder.pid)


@contextlib.contextmanager
def _namespace(name: str) -> Iterator[str]:
    _ip("netns", "add", name)
    try:
        yield name
    finally:
        _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=LIMIT)
