"""Machines on one machine: network namespaces on one switch, each with shared memory of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

LIMIT = 30.0
SUBNET = "10.77.0"  # seen inside the namespaces only
FILES = Path("/etc/netns")
"""`ip netns exec` puts what is in there over /etc."""

MEMORY = "mount -t tmpfs tmpfs /dev/shm && echo ready && exec cat"
ENTER = 'exec nsenter --target {} --net --mount --ipc env --chdir="$PWD" "$@"'


class NoNamespacesError(Exception):
    """This machine, or our rights on it, do not allow network namespaces."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A network namespace with an address, and the process that holds its mounts and memory.

    ``name`` is what the others call it.
    """

    name: str
    namespace: str
    address: str
    holder: int

    @property
    def memory(self) -> Path:
        """Its /dev/shm, as it is seen from outside."""
        return Path(f"/proc/{self.holder}/root/dev/shm")

    @property
    def enters(self) -> tuple[str, ...]:
        """What to put before a command so that it runs on this machine."""
        return ("sh", "-c", ENTER.format(self.holder), "sh")

    def cut(self) -> None:
        """Take the machine off the network."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")

    def silence(self) -> None:
        """Let nothing that it sends to others arrive; what they send still comes in."""
        _system(*self.enters, "iptables", "-A", "OUTPUT", "-o", "eth0", "-j", "DROP")

    def lose(self, fraction: float) -> None:
        """Let a fraction of the packets that it sends go lost, by chance."""
        chance = ["-m", "statistic", "--mode", "random", "--probability", f"{fraction:g}"]
        _system(*self.enters, "iptables", "-A", "OUTPUT", "-o", "eth0", *chance, "-j", "DROP")

    def join(self) -> None:
        """Bring it back."""
        _ip("-n", self.namespace, "link", "set", "eth0", "up")

    def make_known(self, name: str) -> None:
        """Let this machine know ``name`` as its own, in place: who looks already sees it."""
        with (FILES / self.namespace / "hosts").open("a") as file:
            file.write(f"{self.address} {name}\n")

    def drop(self, source: Machine, port: int, *, first: bool = False) -> None:
        """Let packets of ``source`` to ``port`` here go lost; ``first``: before other rules."""
        rule = ["-s", source.address, "-p", "tcp", "--dport", str(port), "-j", "DROP"]
        _system(*self.enters, "iptables", "-I" if first else "-A", "INPUT", *rule)

    def open_only(self, first: int, last: int) -> None:
        """Let connections from elsewhere come in at these ports, and drop what comes to others."""
        for rule in (
            ("-A", "INPUT", "-i", "lo", "-j", "ACCEPT"),
            ("-A", "INPUT", "-m", "state", "--state", "ESTABLISHED,RELATED", "-j", "ACCEPT"),
            ("-A", "INPUT", "-p", "tcp", "--dport", f"{first}:{last}", "-j", "ACCEPT"),
            ("-A", "INPUT", "-p", "tcp", "-j", "DROP"),
        ):
            _system(*self.enters, "iptables", *rule)

    def open_all(self) -> None:
        """Let everything through again."""
        for chain in ("INPUT", "OUTPUT"):
            _system(*self.enters, "iptables", "-F", chain)

    def add_address(self, interface: str, address: str) -> None:
        """Give this machine one more interface on the same switch."""
        words = ("link", "add", interface, "link", "eth0", "type", "macvlan", "mode", "bridge")
        _ip("-n", self.namespace, *words)
        _ip("-n", self.namespace, "address", "add", address, "dev", interface)
        _ip("-n", self.namespace, "link", "set", interface, "up")

    def draw_from(self, first: int, last: int) -> None:
        """Let the system draw ports from these only."""
        value = f"net.ipv4.ip_local_port_range={first} {last}"
        _system("ip", "netns", "exec", self.namespace, "sysctl", "-q", "-w", value)

    def slow_down(self, rate: str) -> None:
        """Let what leaves this machine leave at ``rate``, as 1mbit."""
        shape = ["tbf", "rate", rate, "burst", "16kb", "latency", "400ms"]
        _system("tc", "-n", self.namespace, "qdisc", "add", "dev", "eth0", "root", *shape)


@contextmanager
def network(*names: str, own_name: str = "") -> Iterator[list[Machine]]:
    """Machines of these names on one switch, gone after the block; they know each other's names.

    ``own_name``: what each calls itself instead of its address, as Debian's 127.0.1.1.
    The switch is in a namespace too, so that no rule of this machine's firewall meets it.
    Raises `NoNamespacesError` where this machine or our rights do not allow them.
    """
    if os.geteuid() != 0:
        raise NoNamespacesError("network namespaces need root")
    if missing := [word for word in ("ip", "tc", "iptables") if shutil.which(word) is None]:
        raise NoNamespacesError(f"there is no {missing[0]} here (iproute2, iptables)")
    mark = f"machine-{secrets.token_hex(3)}"
    addresses = {name: f"{SUBNET}.{number}" for number, name in enumerate(names, start=1)}
    with ExitStack() as stack:
        try:
            switch = stack.enter_context(_namespace(f"{mark}-switch"))
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            machines = []
            for name in names:
                known = addresses | ({name: own_name} if own_name else {})
                lines = ["127.0.0.1 localhost", *(f"{known[other]} {other}" for other in names)]
                machine = _machine(switch, mark, name, addresses[name], lines)
                machines.append(stack.enter_context(machine))
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or error
            raise NoNamespacesError(f"network namespaces cannot be made: {said}") from error
        yield machines


@contextmanager
def _machine(
    switch: str, mark: str, name: str, address: str, hosts: Sequence[str]
) -> Iterator[Machine]:
    """A machine at the switch; ``hosts`` are the lines of its /etc/hosts."""
    with _namespace(f"{mark}-{name}") as there, _files(there, hosts):
        _ip("-n", there, "link", "add", "eth0", "type", "veth",
            "peer", "name", name, "netns", switch)  # fmt: skip
        _ip("-n", switch, "link", "set", name, "master", "bridge", "up")
        _ip("-n", there, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", there, "link", "set", device, "up")
        _ip("-n", there, "route", "add", "default", "dev", "eth0")
        words = ["ip", "netns", "exec", there, "unshare", "--mount", "--ipc", "sh", "-c", MEMORY]
        # It ends when its input does, so not even our own violent end leaves it.
        holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with holder:
            assert holder.stdout is not None
            if holder.stdout.readline() != b"ready\n":
                raise OSError("no mounts and memory of its own for a namespace")
            yield Machine(name, there, address, holder.pid)


@contextmanager
def _files(namespace: str, hosts: Sequence[str]) -> Iterator[None]:
    folder = FILES / namespace
    folder.mkdir(parents=True)
    try:
        (folder / "hosts").write_text("\n".join(hosts) + "\n")
        # Without a server for names an unknown one is known to be so at once.
        (folder / "resolv.conf").touch()
        yield
    finally:
        shutil.rmtree(folder)


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    _ip("netns", "add", name)
    try:
        yield name
    finally:
        _ip("netns", "del", name)


def _ip(*words: str) -> None:
    _system("ip", *words)


def _system(*words: str) -> None:
    """Have the system do it; a `CalledProcessError` has what it says against it."""
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=LIMIT)
