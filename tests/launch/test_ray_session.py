"""The connection to a Ray cluster, and its end; no cluster is needed."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from spartito.launch.on_ray.session import is_there
from spartito.wire.ports import free_port

LIMIT = 60.0

GONE = """
import sys
from types import SimpleNamespace
from spartito.wire.ports import free_port

context = SimpleNamespace(gcs_address=f"127.0.0.1:{free_port()}")  # nobody listens
sys.modules["ray"] = SimpleNamespace(
    is_initialized=lambda: False,
    init=lambda **_: None,
    shutdown=lambda: None,
    get_runtime_context=lambda: context,
    util=SimpleNamespace(client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: False))),
)
from spartito.launch.on_ray.session import Ended, connected

ended = Ended()
with connected(None, ended):
    if sys.argv[1:]:
        ended.code = int(sys.argv[1])
print("over")
"""


@pytest.mark.parametrize(("known", "code"), [(["0"], 0), (["7"], 7), ([], 69)])
def test_a_cluster_that_ends_after_the_job_changes_no_exit_code(
    known: list[str], code: int
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", GONE, *known], capture_output=True, text=True, timeout=LIMIT
    )
    assert (ended.returncode, ended.stdout) == (code, "over\n"), ended.stderr


@pytest.mark.parametrize("client", [False, True])
def test_a_client_of_ray_needs_no_way_to_the_port_of_the_head(client: bool) -> None:
    context = SimpleNamespace(gcs_address=f"127.0.0.1:{free_port()}")  # nobody listens
    connected = SimpleNamespace(is_connected=lambda: client)
    ray = SimpleNamespace(
        get_runtime_context=lambda: context,
        util=SimpleNamespace(client=SimpleNamespace(ray=connected)),
    )
    assert is_there(ray) == client
