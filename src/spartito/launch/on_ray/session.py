"""The connection to a Ray cluster, and what is said of one that cannot be."""

from __future__ import annotations

import atexit
import logging
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from spartito.errors import EXIT_TASK_LOST, UserError
from spartito.packages import package
from spartito.wire.addresses import split_address
from spartito.wire.dialing import connect

REACH_SECONDS = 5.0
"""For a connection to the cluster's head."""


@dataclass
class Ended:
    """The exit code of a job; until it is known, that of one that lost its cluster."""

    code: int = EXIT_TASK_LOST


@contextmanager
def connected(address: str | None, ended: Ended) -> Iterator[Any]:
    """Ray, in a block in which it is connected to the cluster at ``address``.

    A program that has a connection already keeps it, then and afterwards. One whose own cannot be
    closed, as the cluster is gone, exits as its job ``ended``. Raises `UserError`.
    """
    ray = package("ray", "Ray cannot be imported", "pip install 'spartito[ray]'")
    if ray.is_initialized():
        if address is not None:
            raise UserError(
                f"the address {address}, but this program is connected to Ray already",
                "Leave the address out, or call ray.shutdown() before.",
            )
        yield ray
        return
    address = address or "auto"
    _check_reached(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise _no_cluster(address) from error
    except RuntimeError as error:
        raise _refused(address, error, ray.__version__) from error
    with suppress(
        ImportError, AttributeError
    ):  # what Ray itself says of lost actors, in our output
        from ray._private.ray_logging import global_worker_stdstream_dispatcher

        global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")
    try:
        yield ray
    finally:
        if is_there(ray):
            ray.shutdown()
        else:  # it would wait for a minute, and then end this process with 1
            atexit.unregister(ray.shutdown)
            atexit.register(_end, ended)


def _end(ended: Ended) -> None:
    """End this process, whose connection to a cluster that is gone cannot be closed any more."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it
            stream.flush()
    os._exit(ended.code)


def is_there(ray: Any) -> bool:
    """Whether the head of the cluster that ``ray`` is connected to can still be reached."""
    try:
        host, port = split_address(ray.get_runtime_context().gcs_address)
        if ray.util.client.ray.is_connected():  # outside: another port, which has just replied
            return True
        connect(host, port, REACH_SECONDS).close()
    except OSError:
        return False
    return True


def check_fits(bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raise `UserError` where tasks with these resources could never all be there at once.

    ``nodes`` are what Ray says of them. The largest go first, each to the first that has enough.
    """
    alive = [node for node in nodes if node["Alive"]]
    free = [dict(node["Resources"]) for node in alive]
    for bundle in sorted(bundles, key=lambda one: (one.get("GPU", 0), one["CPU"]), reverse=True):
        for left in free:
            if all(left.get(name, 0.0) >= count for name, count in bundle.items()):
                for name, count in bundle.items():
                    left[name] -= count
                break
        else:
            there = "; ".join(
                f"{node['NodeManagerAddress']} has {resources(node['Resources'])}" for node in alive
            )
            raise UserError(
                f"{len(bundles)} tasks, one of {resources(bundle)}, do not fit this Ray cluster "
                f"({there})",
                "Ask for fewer workers, or less for each: --cpus, --gpus.",
            )


def resources(of: Mapping[str, float]) -> str:
    """CPUs and GPUs, as a message says them."""
    return ", ".join(f"{of[name]:g} {name}" for name in ("CPU", "GPU") if of.get(name)) or "none"


def _check_reached(address: str) -> None:
    if address == "auto":
        return
    if "://" in address:
        raise UserError(
            f"--ray {address}: the tasks are followed from inside the cluster",
            "Give the head's address as HOST:6379, or auto on one of its nodes.",
        )
    host, port = split_address(address)
    try:
        connect(host, port, REACH_SECONDS).close()
    except OSError as error:
        raise _no_cluster(address) from error


def _no_cluster(address: str) -> UserError:
    where = "on this machine" if address == "auto" else f"at {address}"
    return UserError(
        f"there is no Ray cluster {where}",
        "Start one, as ray start --head --port=6379, and give --ray HOST:6379.",
    )


def _refused(address: str, error: RuntimeError, version: str) -> UserError:
    """What Ray says of versions that differ."""
    text = str(error).strip()
    if "ersion mismatch" in text:
        words = " ".join(line.strip() for line in text.splitlines())
        return UserError(
            f"the Ray cluster at {address} has other versions: {words}",
            f"Here are Ray {version} and Python {platform.python_version()}: install what the "
            "cluster has.",
        )
    return UserError(f"the Ray cluster at {address} cannot be joined: {text.splitlines()[0]}")
