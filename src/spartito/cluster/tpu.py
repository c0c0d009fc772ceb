"""The cluster of Cloud TPU slices: a task for each host, by variables or the metadata server.

GKE, and who starts TPU machines otherwise, set variables. On TPU VMs the metadata server tells the
same; it is asked where the machine has a TPU and the variables are not there. Tested with
environments and a server as Google's documentation and programs that read them describe, never on
a TPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from spartito.cluster.address_list import count, numbered
from spartito.cluster.endpoints import port_range
from spartito.cluster.spec import ClusterSpec
from spartito.errors import UserError
from spartito.system.tpus import PCI, VFIO, attached
from spartito.wire.addresses import address, is_loopback

SOURCE = "Cloud TPU"

PORT = 29_500
"""Where the hosts meet unless ``SPARTITO_PORTS`` says otherwise."""

WORKER, HOSTNAMES, TOPOLOGY = "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_TOPOLOGY"
"""Which host of its slice this is, the names of all of them, and the chips, as ``4x4``."""

SLICES, SLICE = "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"
COORDINATOR = "MEGASCALE_COORDINATOR_ADDRESS"
"""How many slices compute together, which of them this is, and the first host of the first one."""

SKIP_METADATA = "TPU_SKIP_MDS_QUERY"
METADATA_HOST = "GCE_METADATA_HOST"
"""Google's own variables: do not ask the metadata server; where it is."""

METADATA = "metadata.google.internal"
METADATA_SECONDS = 5.0
"""How long the server, which is in the same machine, may take for each of three questions."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The slice of which this machine is a host.

    ``hosts`` are the names of its hosts in order, ``worker`` the index of this one among them,
    ``topology`` its chips as Google writes them, empty where nobody says. It is number ``number``
    of ``slices``, which meet at the host ``coordinator``.
    """

    hosts: tuple[str, ...]
    worker: int
    topology: str
    slices: int
    number: int
    coordinator: str


def applies(env: Mapping[str, str], pci: Path = PCI, vfio: Path = VFIO) -> bool:
    """Whether this is one of several hosts, and no launcher has divided it already.

    Without variables a machine that has a TPU may be one: the metadata server knows.
    """
    if env.get("LOCAL_RANK"):
        return False
    several = "," in env.get(HOSTNAMES, "") or env.get(SLICES, "").strip() not in ("", "1")
    return several or _is_unnamed(env) or _asks(env, pci, vfio)


def from_tpu(env: Mapping[str, str], pci: Path = PCI, vfio: Path = VFIO) -> ClusterSpec | None:
    """The cluster of all hosts of the slices, a worker on each; None for one host alone.

    Slices are numbered one after another, and so are the hosts of each.
    """
    if not applies(env, pci, vfio):
        return None
    here = slice_of(env, pci, vfio)
    if here is None or here.slices * len(here.hosts) < 2:
        return None
    each = len(here.hosts)
    allowed = port_range(env)
    meeting = address(here.coordinator, PORT if allowed is None else allowed[0])
    # GKE names a pod as often as it has containers with chips.
    own = [host for host in here.hosts if host == here.hosts[here.worker]]
    local = here.hosts[: here.worker].count(own[0])
    rank = here.number * each + here.worker
    return numbered(rank, here.slices * each, local, len(own), meeting, SOURCE)


def slice_of(env: Mapping[str, str], pci: Path = PCI, vfio: Path = VFIO) -> Slice | None:
    """The slice of this machine, as variables or the metadata server say.

    Args:
        env: the variables.
        pci: as for `attached`.
        vfio: as for `attached`.

    Returns:
        The slice; None where nobody knows of one.

    Raises:
        UserError: what is said does not fit together, or the server says nothing.
    """
    if env.get(HOSTNAMES, "").strip():
        return _slice(env)
    if _is_unnamed(env) and not _asks(env, pci, vfio):
        raise UserError(
            f"{WORKER}={env[WORKER]} says that there are other hosts, but {HOSTNAMES} is not set",
            f"Set it to the names of all, or unset {WORKER} where this host is alone.",
        )
    told = _from_metadata(env) if _asks(env, pci, vfio) else {}
    return _slice({**env, **told}) if told else None


def _is_unnamed(env: Mapping[str, str]) -> bool:
    """Whether this is not the first host, and nothing names the others."""
    return not env.get(HOSTNAMES, "").strip() and env.get(WORKER, "").strip() not in ("", "0")


def _asks(env: Mapping[str, str], pci: Path, vfio: Path) -> bool:
    """Whether the metadata server is to be asked: never on a machine without a TPU."""
    skips = env.get(SKIP_METADATA, "").strip().lower() not in ("", "0", "false")
    return not skips and not env.get(HOSTNAMES, "").strip() and attached(pci, vfio) is not None


def _slice(env: Mapping[str, str]) -> Slice:
    hosts = tuple(name.strip() for name in env[HOSTNAMES].split(",") if name.strip())
    worker = count(env, WORKER, None if len(hosts) > 1 else 0)
    slices, number = count(env, SLICES, 1), count(env, SLICE, 0)
    coordinator = _host(env.get(COORDINATOR, "").strip())
    if worker >= len(hosts):
        raise UserError(
            f"{WORKER}={worker}, but {HOSTNAMES} names {len(hosts)} hosts: {','.join(hosts)}",
            f"All hosts of a slice get one {HOSTNAMES}, in which {WORKER} counts from 0.",
        )
    if len(hosts) > 1 and (loop := next(filter(is_loopback, hosts), None)):
        raise UserError(
            f"{HOSTNAMES} names {loop} among {len(hosts)} hosts: on each host that is the host "
            "itself",
            "Name each as the others reach it.",
        )
    if number >= max(slices, 1):
        raise UserError(
            f"{SLICE}={number}, but {SLICES}={slices}", f"Slices are numbered from 0 to {SLICES}-1."
        )
    if slices > 1 and not (coordinator and env.get(SLICE, "").strip()):
        missing = COORDINATOR if not coordinator else SLICE
        raise UserError(
            f"{SLICES}={slices}, but {missing} is not set",
            f"Each host gets {SLICE}, and {COORDINATOR} is the first host of slice 0 for all.",
        )
    first = coordinator if slices > 1 else hosts[0]
    return Slice(hosts, worker, env.get(TOPOLOGY, "").strip(), max(slices, 1), number, first)


def _host(text: str) -> str:
    """The host of ``host``, ``host:port``, ``[ipv6]:port`` or a bare IPv6 address."""
    host, colon, port = text.rpartition(":")
    has_port = colon and port.isdigit() and (":" not in host or host.endswith("]"))
    return (host if has_port else text).strip("[]")


def _from_metadata(env: Mapping[str, str]) -> dict[str, str]:
    """What the metadata server says, under the names that variables have; empty for no TPU VM."""
    server = env.get(METADATA_HOST, "").strip() or METADATA
    number = _attribute(server, "agent-worker-number")
    endpoints = _attribute(server, "worker-network-endpoints")
    if number is None or endpoints is None:
        return {}
    if env.get(WORKER, number).strip() != number:
        raise UserError(
            f"{WORKER}={env[WORKER]}, but the metadata server says {number}",
            f"Unset {WORKER}, or set {HOSTNAMES} too: then the server is not asked.",
        )
    told = dict(_lines(_attribute(server, "tpu-env") or ""))
    found = {name: told[name] for name in (SLICES, SLICE, COORDINATOR) if told.get(name)}
    return {
        WORKER: number,
        HOSTNAMES: ",".join(_endpoint(one) for one in endpoints.split(",")),
        TOPOLOGY: told.get("TOPOLOGY", env.get(TOPOLOGY, "")),
        **found,
    }


def _attribute(server: str, name: str) -> str | None:
    """An attribute of this machine; None where the server knows none of this name."""
    # Half of what this package takes to import, and needed nowhere else.
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import ProxyHandler, Request, build_opener

    url = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    request = Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        # Never by a proxy: the server is in this machine.
        with build_opener(ProxyHandler({})).open(request, timeout=METADATA_SECONDS) as reply:
            return str(reply.read().decode().strip())
    except HTTPError as error:
        if error.code == 404:
            return None
        said = f"says {error.code}"
    except (OSError, HTTPException) as error:
        said = f"does not reply: {getattr(error, 'reason', None) or error}"
    raise UserError(
        f"this machine has a TPU, but its metadata server {server} {said}",
        f"{SKIP_METADATA}=1 where this host is alone; else set {WORKER} and {HOSTNAMES}.",
    )


def _endpoint(text: str) -> str:
    """The address in ``unknown:unknown:10.0.0.1``, as the server writes it."""
    host = text.strip().split(":", 2)[-1]
    if not host:
        raise UserError(
            f"the metadata server names a host {text!r}, which has no address",
            f"Set {WORKER} and {HOSTNAMES}.",
        )
    return host


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """The names and values of ``NAME: 'value'``, one a line."""
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            yield name.strip(), value.strip().strip("'\"")
