"""Machines on one machine: network namespaces on one switch, each with shared memory of its own.

They have no names: the kernel removes them with the last process in them. A holder keeps each,
and ends when we do, however we end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from spartito.launch.lines.line import Link

LIMIT = 30.0
SUBNET = "10.77.0"  # seen inside the namespaces only
TOOLS = ("ip", "tc", "nsenter", "unshare")

HOLD = "echo ready && exec cat"
MEMORY = f"""
mount -t tmpfs tmpfs /dev/shm && printf %s "$1" > /dev/shm/hosts &&
mount --bind /dev/shm/hosts /etc/hosts && rm /dev/shm/hosts &&
mount --bind /dev/null /etc/resolv.conf && {HOLD}
"""
"""Without a server for names an unknown one is known to be so at once."""
ENTER = 'exec nsenter --target {} --net --mount --ipc env --chdir="$PWD" "$@"'


class NoNamespacesError(Exception):
    """This machine, or our rights on it, do not allow network namespaces."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A network namespace with an address, and the process that holds it, its mounts and memory.

    ``name`` is what the others call it, ``switch`` the process that holds the network.
    """

    name: str
    address: str
    holder: int
    switch: int

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
        self._ip("link", "set", "eth0", "down")

    def silence(self) -> None:
        """Let nothing that it sends to others arrive; what they send still comes in."""
        _system(*self.enters, "iptables", "-A", "OUTPUT", "-o", "eth0", "-j", "DROP")

    def lose(self, fraction: float) -> None:
        """Let a fraction of the packets that it sends go lost, by chance."""
        chance = ["-m", "statistic", "--mode", "random", "--probability", f"{fraction:g}"]
        _system(*self.enters, "iptables", "-A", "OUTPUT", "-o", "eth0", *chance, "-j", "DROP")

    def join(self) -> None:
        """Bring it back."""
        self._ip("link", "set", "eth0", "up")

    def make_known(self, name: str) -> None:
        """Let this machine know ``name`` as its own, in place: who looks already sees it."""
        with Path(f"/proc/{self.holder}/root/etc/hosts").open("a") as file:
            file.write(f"{self.address} {name}\n")

    def drop(self, source: Machine, port: int, *, first: bool = False) -> None:
        """Let packets of ``source`` to ``port`` here go lost; ``first``: before other rules."""
        rule = ["-s", source.address, "-p", "tcp", "--dport", str(port), "-j", "DROP"]
        _system(*self.enters, "iptables", "-I" if first else "-A", "INPUT", *rule)

    def drop_large(self, size: int) -> None:
        """Let packets of so many bytes or more, which others send here, go lost without a word."""
        # What the others' kernel has put together would count as one large packet.
        _inside(self.switch, "ip", "link", "set", "dev", self.name, "gso_max_segs", "1")
        rule = ["-i", "eth0", "-m", "length", "--length", f"{size}:65535", "-j", "DROP"]
        _system(*self.enters, "iptables", "-A", "INPUT", *rule)

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
        self._ip(*words)
        self._ip("address", "add", address, "dev", interface)
        self._ip("link", "set", interface, "up")

    def draw_from(self, first: int, last: int) -> None:
        """Let the system draw ports from these only."""
        value = f"net.ipv4.ip_local_port_range={first} {last}"
        _system(*self.enters, "sysctl", "-q", "-w", value)

    def slow_down(self, link: Link, *, both: bool = True) -> None:
        """Let what it sends, and with ``both`` what it gets too, come over such a line."""
        _inside(self.holder, "tc", "qdisc", "add", "dev", "eth0", "root", *link.out)
        if both:
            _inside(self.switch, "tc", "qdisc", "add", "dev", self.name, "root", *link.back)

    def _ip(self, *words: str) -> None:
        _inside(self.holder, "ip", *words)


@contextmanager
def network(
    *names: str, own_name: str = "", needs: Sequence[str] = ("iptables",)
) -> Iterator[list[Machine]]:
    """Machines of these names on one switch, gone after the block; they know each other's names.

    The switch is in a namespace too, so that no rule of this machine's firewall meets it.

    Args:
        names: of at most 15 characters.
        own_name: what each calls itself instead of its address, as Debian's 127.0.1.1.
        needs: programs that are called later.

    Raises:
        NoNamespacesError: this machine or our rights do not allow them.
    """
    if os.geteuid() != 0:
        raise NoNamespacesError("network namespaces need root")
    if missing := [word for word in (*TOOLS, *needs) if shutil.which(word) is None]:
        raise NoNamespacesError(
            f"there is no {missing[0]} here (it is in iproute2, iptables or util-linux)"
        )
    addresses = {name: f"{SUBNET}.{number}" for number, name in enumerate(names, start=1)}
    with ExitStack() as stack:
        try:
            switch = stack.enter_context(_held("--net", "sh", "-c", HOLD))
            _inside(switch, "ip", "link", "add", "bridge", "type", "bridge")
            _inside(switch, "ip", "link", "set", "bridge", "up")
            machines = []
            for name in names:
                known = addresses | ({name: own_name} if own_name else {})
                lines = ["127.0.0.1 localhost", *(f"{known[other]} {other}" for other in names)]
                machine = _machine(switch, name, addresses[name], lines)
                machines.append(stack.enter_context(machine))
        except (OSError, subprocess.SubprocessError) as error:
            raise NoNamespacesError(f"network namespaces cannot be made: {said(error)}") from error
        yield machines


@contextmanager
def _machine(switch: int, name: str, address: str, hosts: Sequence[str]) -> Iterator[Machine]:
    """A machine at the switch; ``hosts`` are the lines of its /etc/hosts."""
    known = "".join(f"{line}\n" for line in hosts)
    with _held("--net", "--mount", "--ipc", "sh", "-c", MEMORY, "sh", known) as holder:
        machine = Machine(name, address, holder, switch)
        _inside(holder, "ip", "link", "add", "eth0", "type", "veth",
                "peer", "name", name, "netns", str(switch))  # fmt: skip
        _inside(switch, "ip", "link", "set", "dev", name, "master", "bridge", "up")
        machine._ip("address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            machine._ip("link", "set", device, "up")
        machine._ip("route", "add", "default", "dev", "eth0")
        yield machine


@contextmanager
def _held(*words: str) -> Iterator[int]:
    """A process in namespaces of its own, as ``unshare`` makes them of ``words``."""
    holder = subprocess.Popen(
        ["unshare", *words],
        stdin=subprocess.PIPE,  # it ends when this does
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is not for it
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != b"ready\n":
            raise OSError(holder.stderr.read().decode(errors="replace").strip())
        yield holder.pid


def said(error: Exception) -> str:
    """What a program said that failed, or the error itself."""
    return str(getattr(error, "stderr", None) or error).strip()


def _inside(holder: int, *words: str) -> None:
    """Have the system do it in a holder's network."""
    _system("nsenter", "--target", str(holder), "--net", *words)


def _system(*words: str) -> None:
    """Have the system do it; a `CalledProcessError` has what it says against it."""
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=LIMIT)
