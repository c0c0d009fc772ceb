"""Hosts made of network namespaces, with cables to one switch: each has an address of its own.

Nothing of this machine's own network is touched: the switch is a namespace too.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

FILES = Path("/etc/netns")
"""`ip netns exec` puts what is in there over /etc."""


@dataclass(frozen=True)
class Host:
    """One host: ``name`` is what the others call it, ``namespace`` what the system does."""

    name: str
    namespace: str
    address: str

    @property
    def enters(self) -> tuple[str, ...]:
        """The words before a command that runs on this host."""
        return ("ip", "netns", "exec", self.namespace)

    def drop(self, source: Host, port: int) -> None:
        """Let packets of ``source`` to ``port`` here go lost."""
        rule = ["-s", source.address, "-p", "tcp", "--dport", str(port), "-j", "DROP"]
        system(*self.enters, "iptables", "-A", "INPUT", *rule)

    def slow_down(self, rate: str) -> None:
        """Let what leaves this host leave at ``rate``, as 1mbit."""
        shape = ["tbf", "rate", rate, "burst", "16kb", "latency", "400ms"]
        system("tc", "-n", self.namespace, "qdisc", "add", "dev", "eth0", "root", *shape)


def why_not() -> str:
    """Why such hosts cannot be made here, "" where they can."""
    if os.getuid() != 0:
        return "network namespaces need root"
    missing = [word for word in ("ip", "tc", "iptables") if shutil.which(word) is None]
    if missing:
        return f"there is no {missing[0]} here (iproute2, iptables)"
    name = f"doctor-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=30)
    if made.returncode:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    system("ip", "netns", "delete", name)
    return ""


@contextmanager
def hosts_on_a_switch(*names: str, own_name: str = "") -> Iterator[list[Host]]:
    """Hosts of these names, 10.77.0.1 and so on, which know each other's names.

    ``own_name``: what each calls itself instead of its address, as Debian's 127.0.1.1.
    """
    mark = f"doctor-{secrets.token_hex(3)}"
    hosts = [Host(name, f"{mark}-{name}", f"10.77.0.{n}") for n, name in enumerate(names, start=1)]
    switch = f"{mark}-switch"
    with ExitStack() as stack:
        for namespace in (switch, *(host.namespace for host in hosts)):
            system("ip", "netns", "add", namespace)
            stack.callback(system, "ip", "netns", "delete", namespace)
        system("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        system("ip", "-n", switch, "link", "set", "br0", "up")
        for host in hosts:
            ours = ["link", "add", "eth0", "netns", host.namespace]
            system("ip", *ours, "type", "veth", "peer", "name", host.name, "netns", switch)
            system("ip", "-n", switch, "link", "set", host.name, "master", "br0", "up")
            address = ["address", "add", f"{host.address}/24", "dev", "eth0"]
            system("ip", "-n", host.namespace, *address)
            for device in ("lo", "eth0"):
                system("ip", "-n", host.namespace, "link", "set", device, "up")
            system("ip", "-n", host.namespace, "route", "add", "default", "dev", "eth0")
            folder = FILES / host.namespace
            folder.mkdir(parents=True)
            stack.callback(shutil.rmtree, folder)
            lines = ["127.0.0.1 localhost"]
            lines += [f"{own_name} {host.name}"] if own_name else []
            lines += [f"{h.address} {h.name}" for h in hosts if not own_name or h is not host]
            (folder / "hosts").write_text("\n".join(lines) + "\n")
        yield hosts


def system(*words: str) -> None:
    """Have the system do it; what it says against it fails the test."""
    subprocess.run(words, check=True, timeout=30, capture_output=True)
