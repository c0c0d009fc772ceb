"""The cluster on nodes that SkyPilot or dstack started: each hears its number and all addresses.

Tested with environments as the sources of both set them, never in a cloud.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spartito.cluster.address_list import check_addresses, count, spec_of, task_of, with_roles
from spartito.cluster.endpoints import port_range
from spartito.cluster.spec import ClusterSpec
from spartito.errors import UserError
from spartito.wire.addresses import address

PORT = 29_500
"""Where each task listens where nothing else is said: a node has one task."""


@dataclass(frozen=True, slots=True)
class _Tool:
    """A tool and its variables: our number, how many nodes there are, and all their addresses."""

    name: str
    rank: str
    nodes: str
    addresses: str


TOOLS = (
    _Tool("SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"),
    _Tool("dstack", "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_NODES_IPS"),
)


def applies(env: Mapping[str, str]) -> bool:
    """Whether one of the tools says that this is one of several nodes."""
    return _tool(env) is not None


def from_clouds(env: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster of the nodes, a task on each; None outside of `applies`.

    The nodes are workers. ``SPARTITO_CHIEF`` makes the first one the chief, and of the last ones
    ``SPARTITO_PS`` are parameter servers, and ``SPARTITO_EVALUATOR`` the very last one the
    evaluator. All listen at the first port of ``SPARTITO_PORTS``, or at 29500.
    """
    tool = _tool(env)
    if tool is None:
        return None
    nodes, rank = count(env, tool.nodes), count(env, tool.rank)
    hosts = env.get(tool.addresses, "").split()
    if len(hosts) != nodes or rank >= nodes:
        raise UserError(
            f"{tool.name} says node {rank} of {nodes}, and in {tool.addresses} the addresses of "
            f"{len(hosts)}: {' '.join(hosts) or 'none'}",
            "The nodes of the job must reach each other: take a kind of cloud where they do.",
        )
    allowed = port_range(env)
    port = PORT if allowed is None else allowed[0]
    roles = with_roles([address(host, port) for host in hosts], env, tool.name, chief=True)
    check_addresses(roles, tool.name)
    return spec_of(roles, task_of(rank, roles), tool.name)


def _tool(env: Mapping[str, str]) -> _Tool | None:
    """The tool that says who we are; what prepares a node has no number yet."""
    told = (tool for tool in TOOLS if env.get(tool.rank) and env.get(tool.nodes, "1") != "1")
    return next(told, None)
