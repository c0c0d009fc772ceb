"""Ask each source in turn who we are; the first that knows decides."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from spartito.cluster import directory, file, kubernetes, mpi, slurm, tf_config, torchrun
from spartito.cluster.spec import ClusterSpec
from spartito.errors import UserError


@dataclass(frozen=True, slots=True)
class Resolver:
    """One source of the cluster.

    ``speaks`` tells whether an environment says anything of this kind; ``read`` answers the
    cluster, None where it does not, `UserError` where it is wrong. ``waits``: it is no function
    of the environment alone, because it waits for the other tasks.
    """

    name: str
    speaks: Callable[[Mapping[str, str]], bool]
    read: Callable[[Mapping[str, str]], ClusterSpec | None]
    waits: bool = False


RESOLVERS: tuple[Resolver, ...] = (
    Resolver(tf_config.VARIABLE, tf_config.speaks, tf_config.from_tf_config),
    Resolver(torchrun.SOURCE, torchrun.speaks, torchrun.from_torchrun),
    Resolver("Kubernetes", kubernetes.speaks, kubernetes.from_kubernetes),
    Resolver(slurm.SOURCE, slurm.speaks, slurm.from_slurm),
    Resolver("MPI", mpi.speaks, mpi.from_mpi),
    Resolver(file.VARIABLE, file.speaks, file.from_file),
    Resolver(directory.VARIABLE, directory.speaks, directory.from_directory, waits=True),
)
"""In order of precedence."""


def resolve(env: Mapping[str, str] | None = None) -> ClusterSpec:
    """The cluster that ``env`` (this process's own by default) describes; else alone."""
    variables = os.environ if env is None else env
    for resolver in RESOLVERS:
        spec = resolver.read(variables)
        if spec is not None:
            return spec
    return ClusterSpec.alone()


def remarks(spec: ClusterSpec, env: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """What a reader should know about where ``spec`` comes from; mostly nothing.

    Which sources in ``env`` tell otherwise and were passed over, and that one is alone in an
    allocation for several tasks.
    """
    variables = os.environ if env is None else env
    speaking = [resolver for resolver in RESOLVERS if resolver.speaks(variables)]
    others = [r.name for r in speaking[1:] if not _agrees(r, spec, variables)]
    passed = f"the cluster comes from {spec.source}; passed over: {', '.join(others)}"
    alone = None if speaking else slurm.remark(variables)
    return ((passed,) if others else ()) + ((alone,) if alone else ())


def _agrees(resolver: Resolver, spec: ClusterSpec, env: Mapping[str, str]) -> bool:
    """Whether ``resolver`` would have told the same of us."""
    if resolver.waits:
        return False
    try:
        other = resolver.read(env)
    except UserError:
        return False  # what is wrong in a source that nobody uses is no error
    return other is not None and _self(other) == _self(spec)


def _self(spec: ClusterSpec) -> tuple[object, ...]:
    return spec.task, spec.rank, spec.num_replicas
