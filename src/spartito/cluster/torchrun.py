"""The cluster by torchrun's variables, which ``spartito run`` sets as well."""

from __future__ import annotations

from collections.abc import Mapping

from spartito.cluster.address_list import count, numbered
from spartito.cluster.spec import ClusterSpec
from spartito.errors import UserError
from spartito.wire.addresses import address

COUNTS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
VARIABLES = (*COUNTS, "MASTER_ADDR", "MASTER_PORT")
SOURCE = "torchrun's variables"
RUN = "TORCHELASTIC_RUN_ID"
"""What torchrun's own agent sets beside them."""


def applies(env: Mapping[str, str]) -> bool:
    """Whether ``RANK`` or ``WORLD_SIZE`` is set, and not for a whole pod (Kubeflow's)."""
    pod = "PET_NNODES" in env and not env.get("LOCAL_RANK")
    return bool(env.get("RANK") or env.get("WORLD_SIZE")) and not pod


def from_torchrun(env: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster of ``RANK`` of ``WORLD_SIZE`` workers; None where neither is set."""
    if not applies(env):
        return None
    missing = [name for name in VARIABLES if not env.get(name)]
    if missing:
        given = " ".join(f"{name}={env[name]}" for name in VARIABLES if env.get(name))
        one_each = " (LOCAL_RANK=0 LOCAL_WORLD_SIZE=1: one process on each machine)"
        raise UserError(
            f"{given} is set, but {', '.join(missing)} is not; torchrun sets all of them",
            f"Start with torchrun, set {', '.join(missing)}"
            f"{one_each if 'LOCAL_RANK' in missing else ''}, or unset RANK and WORLD_SIZE.",
        )
    rank, size, local_rank, local_size = (count(env, name) for name in COUNTS)
    for name, value, limit in (
        ("RANK", rank, size),
        ("LOCAL_RANK", local_rank, local_size),
        ("LOCAL_RANK", local_rank, rank + 1),
        ("LOCAL_WORLD_SIZE", local_size, size + 1),
    ):
        if value >= limit:
            given = " ".join(f"{name}={env[name]}" for name in COUNTS)
            raise UserError(f"{name}={value} must be less than {limit} with {given}")
    meeting = address(env["MASTER_ADDR"], count(env, "MASTER_PORT"))
    return numbered(rank, size, local_rank, local_size, meeting, SOURCE)
