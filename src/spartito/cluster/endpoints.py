"""Where each task listens: training and the doctor both ask this."""

from __future__ import annotations

import os
from collections.abc import Mapping
from ipaddress import ip_address

from spartito.cluster.address_list import ENV_ADDRESS
from spartito.cluster.spec import ClusterSpec
from spartito.errors import UserError
from spartito.names import ENV_INTERFACE, ENV_PORTS
from spartito.notes import warn
from spartito.system import PROC
from spartito.wire.addresses import DRAWN, Endpoint, is_loopback, split_address
from spartito.wire.interfaces import address_of, own_address, own_addresses
from spartito.wire.ports import is_own
from spartito.wire.secret import Key, insecurity, key_among

SYSTEM_RANGE = PROC / "sys/net/ipv4/ip_local_port_range"
"""Where the kernel says which ports it draws."""


def port_range(env: Mapping[str, str] = os.environ) -> range | None:
    """The ports ``SPARTITO_PORTS`` allows, as ``29500-29510``; None where it is not set."""
    text = env.get(ENV_PORTS, "").strip()
    return parse_range(text, ENV_PORTS) if text else None


def parse_range(text: str, source: str) -> range:
    """The ports of ``29500-29510`` or ``29500``; `UserError` that names ``source`` if none."""
    first, _, last = text.partition("-")
    numbers = [part.strip() for part in (first, last or first)]
    if all(part.isascii() and part.isdigit() for part in numbers):
        low, high = map(int, numbers)
        if 0 < low <= high < 65536:
            return range(low, high + 1)
    raise UserError(
        f"{source} {text!r} is not a range of ports", "Write the first and the last: 29500-29510"
    )


def chosen_interface(env: Mapping[str, str] = os.environ) -> str:
    """The address of the interface that ``SPARTITO_INTERFACE`` names (or is); "" if not set."""
    given = env.get(ENV_INTERFACE, "").strip()
    if not given:
        return ""
    if _is_number(given) and is_own(given):
        return given
    if found := address_of(given):
        return found
    listed = ", ".join(f"{name} ({address})" for name, address in own_addresses().items())
    raise UserError(
        f"{ENV_INTERFACE}={given!r} is no interface of this machine and no address of one",
        f"Known: {listed}.",
    )


def rendezvous_endpoint(spec: ClusterSpec, env: Mapping[str, str] = os.environ) -> Endpoint:
    """Where the first task listens: all others come there first."""
    host, port = split_address(spec.rendezvous or "")
    name = str(spec.replica_tasks[0])
    return Endpoint(name, host, (port,), spec.spans_hosts, chosen_interface(env))


def server_endpoint(spec: ClusterSpec, env: Mapping[str, str] = os.environ) -> Endpoint:
    """Where this parameter server listens."""
    host, port = split_address(spec.address_of(spec.task))
    return Endpoint(str(spec.task), host, (port,), spec.spans_hosts, chosen_interface(env))


def peer_endpoint(spec: ClusterSpec, env: Mapping[str, str] = os.environ) -> Endpoint:
    """Where this replica listens for those before it, where replicas use sockets.

    A range of ports comes first; else the task's own port, by the cluster or by
    ``SPARTITO_ADDRESS``, and where that is taken or nobody says one, a port that is drawn.
    """
    declared = env.get(ENV_ADDRESS, "").strip() or spec.address_of(spec.task)
    host, port = split_address(declared) if declared else ("", DRAWN)
    allowed = port_range(env)
    if allowed is not None:
        ports = tuple(sorted(allowed, key=lambda each: each != port))
    else:
        ports = (port, DRAWN) if port else (DRAWN,)
    interface = chosen_interface(env)
    host = interface or host or _routed(spec)
    return Endpoint(str(spec.task), host, ports, spec.spans_hosts, interface)


def group_endpoint(spec: ClusterSpec, env: Mapping[str, str] = os.environ) -> Endpoint:
    """Where this replica listens in a process group: gloo and NCCL take what the system draws."""
    host = chosen_interface(env) or _routed(spec)
    return Endpoint(str(spec.task), host, (DRAWN,), spec.spans_hosts)


def check_drawn(env: Mapping[str, str] = os.environ) -> None:
    """Raise `UserError` where a process group could leave the range of ports that is allowed."""
    allowed = port_range(env)
    if allowed is None:
        return
    try:
        low, high = map(int, SYSTEM_RANGE.read_text().split())
    except (OSError, ValueError):
        low, high = 1, 65535  # a system that does not tell
    if low not in allowed or high not in allowed:
        raise UserError(
            f"a process group (gloo, NCCL) listens on ports that the system draws from {low} to "
            f"{high}, not on {allowed[0]}-{allowed[-1]}",
            "Leave communication at 'auto' on CPUs. Or let the system draw from these only: "
            f"sysctl -w net.ipv4.ip_local_port_range='{allowed[0]} {allowed[-1]}'",
        )


def training_endpoints(spec: ClusterSpec, env: Mapping[str, str], *, group: bool) -> list[Endpoint]:
    """Where this task listens in training; ``group``: replicas form a process group."""
    is_first = spec.task == spec.replica_tasks[0]
    rendezvous = [rendezvous_endpoint(spec, env)] if is_first else []
    if spec.addresses.get("ps"):
        return [server_endpoint(spec, env)] if spec.task.type == "ps" else rendezvous
    if spec.task not in spec.replica_tasks:
        return []
    if group:
        return [*rendezvous, group_endpoint(spec, env)]
    return rendezvous or [peer_endpoint(spec, env)]


def _is_number(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _routed(spec: ClusterSpec) -> str:
    """Our address on the way to the first task."""
    known = [address for tasks in spec.addresses.values() for address in tasks if address]
    hosts = dict.fromkeys(split_address(address)[0] for address in known)
    return own_address(*split_address(spec.rendezvous or ""), others=list(hosts))


def job_key(cluster: ClusterSpec, env: Mapping[str, str] | None = None) -> Key:
    """The key by which the tasks of ``cluster`` know each other.

    It is `NO_SECRET` where the environment names none.
    """
    return key_among(open_hosts(cluster), env)


def warn_if_open(cluster: ClusterSpec, env: Mapping[str, str] | None = None) -> None:
    """Have the chief say what others could do to the job of ``cluster``, if anything."""
    if cluster.is_chief and (said := insecurity(open_hosts(cluster), env)):
        warn("%s", said)


def open_hosts(cluster: ClusterSpec) -> list[str]:
    """Where tasks listen that others than this machine reach, as far as addresses tell."""
    addresses = [address for tasks in cluster.addresses.values() for address in tasks]
    hosts = [split_address(one)[0] for one in (*addresses, cluster.rendezvous) if one]
    return [host for host in hosts if not is_loopback(host)]
