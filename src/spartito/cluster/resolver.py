"""The sources of the cluster in order of precedence: the first that applies decides."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from spartito.cluster import (
    clouds,
    directory,
    file,
    kubernetes,
    mpi,
    slurm,
    tf_config,
    torchrun,
    tpu,
)
from spartito.cluster.spec import ClusterSpec, Task
from spartito.errors import UserError
from spartito.names import ENV_JOB
from spartito.registry import added_by_packages


@dataclass(frozen=True, slots=True)
class Resolver:
    """One source of the cluster.

    Attributes:
        name: What messages call it.
        applies: Whether an environment has variables of this kind.
        read: The cluster of an environment; None where it does not apply, `UserError` where it is
            wrong.
        task: For a source whose ``read`` waits for the other tasks: which one we are, without
            waiting; None when alone.
    """

    name: str
    applies: Callable[[Mapping[str, str]], bool]
    read: Callable[[Mapping[str, str]], ClusterSpec | None]
    task: Callable[[Mapping[str, str]], Task | None] | None = None


RESOLVERS: tuple[Resolver, ...] = (
    Resolver(tf_config.VARIABLE, tf_config.applies, tf_config.from_tf_config),
    Resolver(torchrun.SOURCE, torchrun.applies, torchrun.from_torchrun),
    Resolver("Kubernetes", kubernetes.applies, kubernetes.from_kubernetes),
    Resolver(slurm.SOURCE, slurm.applies, slurm.from_slurm),
    Resolver("MPI", mpi.applies, mpi.from_mpi),
    Resolver("SkyPilot or dstack", clouds.applies, clouds.from_clouds),
    Resolver(file.VARIABLE, file.applies, file.from_file),
    Resolver(directory.VARIABLE, directory.applies, directory.from_directory, directory.own_task),
    Resolver(tpu.SOURCE, tpu.applies, tpu.from_tpu),
)
"""Spartito's own, in order of precedence. The last one is a property of the machine, not of a job:
whoever says anything of a job is asked before."""

GROUP = "spartito.resolvers"
"""The entry points by which packages add resolvers, asked after Spartito's own."""


@cache
def resolvers() -> tuple[Resolver, ...]:
    """All resolvers in order of precedence; `UserError` for one that cannot be loaded."""
    found = list(RESOLVERS)
    for point in sorted(added_by_packages(GROUP), key=lambda point: point.name):
        try:
            found.append(point.load())
        except Exception as error:
            raise UserError(
                f"the resolver {point.name!r} cannot be loaded from {point.value}: {error}",
                "Fix or uninstall the package that adds it.",
            ) from error
    return tuple(found)


def resolve(env: Mapping[str, str] | None = None) -> ClusterSpec:
    """The cluster that ``env`` (this process's own by default) describes; else alone."""
    variables = os.environ if env is None else env
    for resolver in resolvers():
        spec = resolver.read(variables)
        if spec is not None:
            return spec
    mpi.check_complete(variables)
    return ClusterSpec.alone()


@dataclass(frozen=True, slots=True)
class Joined:
    """A job of several tasks of which this process is one already.

    ``spec`` is None where it is known only once all tasks are there.
    """

    source: str
    task: Task
    spec: ClusterSpec | None

    @property
    def divisible(self) -> bool:
        """Whether each task may be several processes, which are counted over all tasks."""
        return self.spec is not None and not self.spec.addresses.get("ps")

    @property
    def shares_machine(self) -> bool:
        """Whether a launcher started several tasks here, among which the GPUs are divided.

        Who writes a `TF_CONFIG` gives each task GPUs of its own.
        """
        by_hand = self.source == tf_config.VARIABLE
        return self.spec is not None and self.spec.local_size > 1 and not by_hand


def joined(env: Mapping[str, str]) -> Joined | None:
    """The job of several tasks of which a process with ``env`` is one, None when it is alone.

    What starts processes must ask this first: one job in each of the tasks is hardly meant.
    Waits for nobody; raises `UserError` as `resolve` does.
    """
    for resolver in resolvers():
        if resolver.task is not None and resolver.applies(env):
            task = resolver.task(env)
            return None if task is None else Joined(resolver.name, task, None)
        spec = resolver.read(env)
        if spec is not None:
            several = sum(map(len, spec.addresses.values())) > 1
            return Joined(spec.source, spec.task, spec) if several else None
    mpi.check_complete(env)
    return None


def replicas_here(env: Mapping[str, str] | None = None) -> int:
    """How many replicas this machine has, as far as ``env`` tells without waiting; else 1."""
    try:
        found = joined(os.environ if env is None else env)
    except UserError:  # the strategy will raise it
        return 1
    spec = None if found is None else found.spec
    return 1 if spec is None else max(1, spec.local_size)


def check_alone(env: Mapping[str, str], what: str) -> None:
    """Raise `UserError` where a process with ``env`` is one of several tasks already.

    For a command that starts all tasks of a job, ``what`` as it is typed: each of the several
    would start a job of its own.
    """
    found = joined(env)
    # Every shell of a TPU's host is one of several hosts, and that is no job yet.
    if found is not None and found.source != tpu.SOURCE:
        raise UserError(
            f"{what}, but {found.source} says already that this is {found.task} of a job",
            "Type it once, outside of those tasks.",
        )


def remarks(spec: ClusterSpec, env: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """What a reader should know about where ``spec`` comes from; mostly nothing.

    Which sources in ``env`` differ and were passed over, that one is alone in an
    allocation for several tasks, and that a pod is said to have several processes.
    """
    variables = os.environ if env is None else env
    applying = [resolver for resolver in resolvers() if resolver.applies(variables)]
    others = [r.name for r in applying[1:] if not _agrees(r, spec, variables)]
    passed = f"the cluster comes from {spec.source}; passed over: {', '.join(others)}"
    alone = None if applying else slurm.remark(variables)
    found = (passed if others else None, alone, kubernetes.remark(variables))
    return tuple(remark for remark in found if remark)


def starter(spec: ClusterSpec, env: Mapping[str, str] | None = None) -> str:
    """Who says what ``spec`` is, as the user knows it: what he typed, where that started the job.

    Args:
        spec: The cluster.
        env: Where it was read; this process's own environment by default.
    """
    variables = os.environ if env is None else env
    by_ranks = spec.source == torchrun.SOURCE
    if by_ranks and torchrun.RUN in variables:
        return "torchrun"
    if ENV_JOB in variables and (by_ranks or spec.source == tf_config.VARIABLE):
        return "spartito run"
    return " and ".join(torchrun.COUNTS[:2]) if by_ranks else spec.source


def _agrees(resolver: Resolver, spec: ClusterSpec, env: Mapping[str, str]) -> bool:
    """Whether ``resolver`` says the same of us."""
    if resolver.task is not None:
        return False  # it would wait
    try:
        other = resolver.read(env)
    except UserError:
        return False  # what is wrong in a source that nobody uses is no error
    return other is None or _self(other) == _self(spec)


def _self(spec: ClusterSpec) -> tuple[object, ...]:
    return spec.task, spec.rank, spec.world_size
