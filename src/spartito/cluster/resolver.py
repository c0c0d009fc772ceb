"""Ask each source in turn who we are; the first that knows decides."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from spartito.cluster import directory, file, kubernetes, mpi, slurm, tf_config, torchrun
from spartito.cluster.spec import ClusterSpec, Task
from spartito.errors import UserError


@dataclass(frozen=True, slots=True)
class Resolver:
    """One source of the cluster.

    ``speaks`` tells whether an environment says anything of this kind; ``read`` answers the
    cluster, None where it does not, `UserError` where it is wrong. ``task`` is for a source whose
    ``read`` waits for the other tasks: it answers at once who we are, None when alone.
    """

    name: str
    speaks: Callable[[Mapping[str, str]], bool]
    read: Callable[[Mapping[str, str]], ClusterSpec | None]
    task: Callable[[Mapping[str, str]], Task | None] | None = None


RESOLVERS: tuple[Resolver, ...] = (
    Resolver(tf_config.VARIABLE, tf_config.speaks, tf_config.from_tf_config),
    Resolver(torchrun.SOURCE, torchrun.speaks, torchrun.from_torchrun),
    Resolver("Kubernetes", kubernetes.speaks, kubernetes.from_kubernetes),
    Resolver(slurm.SOURCE, slurm.speaks, slurm.from_slurm),
    Resolver("MPI", mpi.speaks, mpi.from_mpi),
    Resolver(file.VARIABLE, file.speaks, file.from_file),
    Resolver(directory.VARIABLE, directory.speaks, directory.from_directory, directory.own_task),
)
"""In order of precedence."""


def resolve(env: Mapping[str, str] | None = None) -> ClusterSpec:
    """The cluster that ``env`` (this process's own by default) describes; else alone."""
    variables = os.environ if env is None else env
    for resolver in RESOLVERS:
        spec = resolver.read(variables)
        if spec is not None:
            return spec
    mpi.check_told(variables)
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
    for resolver in RESOLVERS:
        if resolver.task is not None and resolver.speaks(env):
            task = resolver.task(env)
            return None if task is None else Joined(resolver.name, task, None)
        spec = resolver.read(env)
        if spec is not None:
            several = sum(map(len, spec.addresses.values())) > 1
            return Joined(spec.source, spec.task, spec) if several else None
    mpi.check_told(env)
    return None


def check_alone(env: Mapping[str, str], what: str) -> None:
    """Raise `UserError` where a process with ``env`` is one of several tasks already.

    For a command that starts all tasks of a job, ``what`` as it is typed: each of the several
    would start a job of its own.
    """
    if (found := joined(env)) is not None:
        raise UserError(
            f"{what}, but {found.source} says already that this is {found.task} of a job",
            "Type it once, outside of those tasks.",
        )


def remarks(spec: ClusterSpec, env: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """What a reader should know about where ``spec`` comes from; mostly nothing.

    Which sources in ``env`` tell otherwise and were passed over, that one is alone in an
    allocation for several tasks, and that a pod is told to have several processes.
    """
    variables = os.environ if env is None else env
    speaking = [resolver for resolver in RESOLVERS if resolver.speaks(variables)]
    others = [r.name for r in speaking[1:] if not _agrees(r, spec, variables)]
    passed = f"the cluster comes from {spec.source}; passed over: {', '.join(others)}"
    alone = None if speaking else slurm.remark(variables)
    told = (passed if others else None, alone, kubernetes.remark(variables))
    return tuple(remark for remark in told if remark)


def _agrees(resolver: Resolver, spec: ClusterSpec, env: Mapping[str, str]) -> bool:
    """Whether ``resolver`` would have told the same of us."""
    if resolver.task is not None:
        return False  # it would wait
    try:
        other = resolver.read(env)
    except UserError:
        return False  # what is wrong in a source that nobody uses is no error
    return other is not None and _self(other) == _self(spec)


def _self(spec: ClusterSpec) -> tuple[object, ...]:
    return spec.task, spec.rank, spec.world_size
