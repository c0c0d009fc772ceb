"""The cluster in Kubernetes: a pod of an indexed Job or JobSet, or of Kubeflow's PyTorchJob.

Tested with environments as the sources of the controllers set them, not on a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping

from spartito.cluster.address_list import (
    ENV_PS,
    ENV_WORKERS,
    check_addresses,
    count,
    numbered,
    spec_of,
    task_of,
    with_servers,
)
from spartito.cluster.spec import ClusterSpec
from spartito.errors import UserError
from spartito.wire.addresses import address

JOB = "Kubernetes' indexed Job"
KUBEFLOW = "Kubeflow's PET_ variables"

ENV_PODS = "SPARTITO_PODS"
"""The address of every pod by its number, as ``train-{index}.train:29500``: the pod's host name
and the headless service."""


def applies(env: Mapping[str, str]) -> bool:
    """Whether a Job says our index and we know how many there are, or Kubeflow says our node."""
    return _in_job(env) or _in_kubeflow(env)


def from_kubernetes(env: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster of the pods; None outside of `applies`.

    Indexed Job: ``SPARTITO_WORKERS`` pods are workers, the ``SPARTITO_PS`` after them parameter
    servers, ``JOB_COMPLETION_INDEX`` is our number and ``SPARTITO_PODS`` everyone's address.
    Kubeflow: ``PET_NODE_RANK`` of ``PET_NNODES`` pods, one process each, which meet at
    ``PET_MASTER_ADDR``.
    """
    if _in_job(env):
        return _from_job(env)
    return _from_kubeflow(env) if _in_kubeflow(env) else None


def remark(env: Mapping[str, str]) -> str | None:
    """What the one process of a pod should know that is said to have several.

    Kubeflow tells torchrun so, of its own accord where the pod has a CPU limit; who starts
    ``python`` has one.
    """
    each = env.get("PET_NPROC_PER_NODE", "").strip()
    if not each.isdecimal() or int(each) < 2 or "PET_NNODES" not in env or env.get("LOCAL_RANK"):
        return None
    return (
        f"PET_NPROC_PER_NODE={each}, but this pod runs one process: torchrun, or spartito run "
        f"--workers {each}, starts {each}"
    )


def _in_job(env: Mapping[str, str]) -> bool:
    return bool(env.get("JOB_COMPLETION_INDEX") and env.get(ENV_WORKERS))


def _in_kubeflow(env: Mapping[str, str]) -> bool:
    # The processes of a torchrun inside of the pod have a local rank, and need nothing of this.
    return env.get("PET_NNODES", "1") not in ("", "1") and not env.get("LOCAL_RANK")


def _from_job(env: Mapping[str, str]) -> ClusterSpec:
    index, servers = count(env, "JOB_COMPLETION_INDEX"), count(env, ENV_PS, 0)
    workers = count(env, ENV_WORKERS)
    pattern = env.get(ENV_PODS, "").strip()
    if workers < 1 or index >= workers + servers:
        raise UserError(
            f"JOB_COMPLETION_INDEX={index}, but {ENV_WORKERS}={workers} and {ENV_PS}={servers}",
            "The Job's completions and parallelism must be the sum of both.",
        )
    if workers + servers > 1 and "{index}" not in pattern:
        raise UserError(
            f"{ENV_PODS}={pattern!r} does not say where the pods are",
            "Give host name, headless service and port: train-{index}.train:29500",
        )
    pods = [pattern.replace("{index}", str(i)) for i in range(workers + servers)]
    found = with_servers(pods, servers)
    if len(pods) > 1:
        check_addresses(found, ENV_PODS)
    return spec_of(found, task_of(index, found), JOB)


def _from_kubeflow(env: Mapping[str, str]) -> ClusterSpec:
    if ":" in env["PET_NNODES"]:
        raise UserError(
            f"PET_NNODES={env['PET_NNODES']!r} is a range, and no pod of an elastic job has a "
            "number: torchrun deals them out",
            "Start it by torchrun: command: [torchrun, train.py]; or leave the elastic policy out.",
        )
    nodes, rank = count(env, "PET_NNODES"), count(env, "PET_NODE_RANK")
    host = env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR")
    if not host:
        raise UserError("PET_NNODES is set, but PET_MASTER_ADDR is not; Kubeflow sets both")
    port = count(env, "PET_MASTER_PORT" if env.get("PET_MASTER_PORT") else "MASTER_PORT", 29_500)
    return numbered(rank, nodes, 0, 1, address(host, port), KUBEFLOW)
