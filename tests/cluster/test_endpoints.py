"""Where each task listens, from its cluster and its environment."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from spartito.cluster import resolve
from spartito.cluster.endpoints import parse_range, training_endpoints
from spartito.errors import UserError
from spartito.wire.addresses import DRAWN, Endpoint
from spartito.wire.interfaces import address_of, interface_of

CLUSTER = {"worker": ["10.0.0.1:29500", "10.0.0.2:29501"]}
SERVED = {**CLUSTER, "ps": ["10.0.0.2:29502"], "evaluator": ["10.0.0.1:29503"]}
LOOPBACK = interface_of("127.0.0.1")


def endpoints(
    cluster: dict[str, list[str]], task: str, index: int, *, group: bool = False, **env: str
) -> Sequence[Endpoint]:
    told = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})}
    return training_endpoints(resolve(told | env), told | env, group=group)


def test_the_first_task_and_servers_have_one_port() -> None:
    for task, index, host, port in (
        ("worker", 0, "10.0.0.1", 29500),
        ("ps", 0, "10.0.0.2", 29502),
    ):
        (endpoint,) = endpoints(SERVED, task, index, SPARTITO_PORTS="29600-29610")
        assert (endpoint.host, endpoint.ports, endpoint.is_fixed) == (host, (port,), True)


def test_beside_servers_nobody_else_listens() -> None:
    assert endpoints(SERVED, "worker", 1) == endpoints(SERVED, "evaluator", 0) == []


def test_a_worker_listens_at_its_own_port_or_at_one_that_is_drawn() -> None:
    (endpoint,) = endpoints(CLUSTER, "worker", 1)
    assert (endpoint.host, endpoint.ports, endpoint.others) == ("10.0.0.2", (29501, DRAWN), True)


def test_a_range_comes_first_and_in_it_the_own_port() -> None:
    (endpoint,) = endpoints(CLUSTER, "worker", 1, SPARTITO_PORTS="29500-29502")
    assert endpoint.ports == (29501, 29500, 29502)
    (endpoint,) = endpoints(CLUSTER, "worker", 1, SPARTITO_PORTS="29510")
    assert endpoint.ports == (29510,)


def test_an_address_of_its_own_is_for_launchers_that_tell_none() -> None:
    env = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
    own = env | {"SPARTITO_ADDRESS": "10.0.0.2:29507"}
    (endpoint,) = training_endpoints(resolve(own), own, group=False)
    assert (endpoint.host, endpoint.ports) == ("10.0.0.2", (29507, DRAWN))


def test_process_groups_listen_where_the_system_says() -> None:
    interface = {"SPARTITO_INTERFACE": "127.0.0.1"}
    meeting, group = endpoints(CLUSTER, "worker", 0, group=True, **interface)
    assert meeting.ports == (29500,)
    assert (group.host, group.ports) == ("127.0.0.1", (DRAWN,))


def test_an_interface_by_its_name_or_address() -> None:
    for given in (LOOPBACK, "127.0.0.1"):
        (endpoint,) = endpoints(CLUSTER, "worker", 1, SPARTITO_INTERFACE=given)
        assert (endpoint.host, endpoint.interface) == ("127.0.0.1", "127.0.0.1")
    assert address_of("no such interface") == ""
    for given in ("eth99", "192.0.2.77"):
        with pytest.raises(UserError, match=rf"'{given}' is no interface of this machine") as error:
            endpoints(CLUSTER, "worker", 1, SPARTITO_INTERFACE=given)
        assert f"{LOOPBACK} (127.0.0.1)" in str(error.value)


@pytest.mark.parametrize("text", ["", "a", "0-5", "5-4", "1-65536", "1-2-3", "-5", "１-２"])
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(UserError, match="is not a range of ports"):
        parse_range(text, "--ports")
