"""The table of strategies: what is known of each one without importing it, let alone torch.

Commands, launchers, the doctor and reports ask here. A package adds a strategy by an entry point:

    [project.entry-points."spartito.strategies"]
    theirs = "package.module:INFO"

``INFO`` is a `StrategyInfo` of this name. Its module must not import torch; the class that it
names is imported when somebody builds the strategy.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any

from spartito.errors import UserError
from spartito.names import nearest

GROUP = "spartito.strategies"
"""The entry points by which packages add strategies."""


@dataclass(frozen=True, slots=True)
class StrategyInfo:
    """What is known of a strategy without importing it.

    Args:
        name: what people call it, as in ``--strategy``.
        implementation: where its class is, a `spartito.Strategy`, as ``"package.module:Class"``.
        one_machine: whether all replicas must run on one machine.
        shares_memory: whether they need one /dev/shm too.
        needs_servers: whether it works with parameter servers; others refuse a cluster with them.
        asynchronous: whether replicas update without waiting for each other.
        recovers: whether a training goes on with the others when a replica is lost.
        most_replicas: the largest number of replicas; None for any number.
        only_on: the kind of devices that it is for, as torch calls it; None for any.
        divides_model: whether tasks have a model between them.
        options: the keyword arguments of its class, but ``cluster``; None: only the class knows.
        nests: whether groups of another strategy may train so, as its ``inside``.
        cannot_hold: strategies that nest, but not in this one.
        about: what it does, in a few words for a table.
    """

    name: str
    implementation: str
    one_machine: bool = False
    shares_memory: bool = False
    needs_servers: bool = False
    asynchronous: bool = False
    recovers: bool = False
    most_replicas: int | None = None
    only_on: str | None = None
    divides_model: bool = False
    options: tuple[str, ...] | None = None
    nests: bool = True
    cannot_hold: tuple[str, ...] = ()
    about: str = ""

    @property
    def needs(self) -> tuple[str, ...]:
        """What a job must have for it, in words."""
        found = {
            "one process": self.most_replicas == 1,
            "one machine": self.one_machine and self.most_replicas != 1,
            "shared memory": self.shares_memory,
            "parameter servers (--ps)": self.needs_servers,
            f"{(self.only_on or '').upper()} devices": self.only_on is not None,
        }
        return tuple(name for name, is_so in found.items() if is_so)

    def check(self, replicas: int, here: int, servers: int) -> None:
        """Raise `UserError` unless the strategy can run on such a cluster.

        Args:
            replicas: all processes that train.
            here: those of them on this machine.
            servers: the parameter servers.
        """
        if servers and not self.needs_servers:
            raise UserError(
                f"{self.name} with {servers} ps: it has no parameter servers",
                f"Leave them out (--ps, TF_CONFIG), or choose {default_name(2, 1)}.",
            )
        if self.needs_servers and not servers:
            raise UserError(
                f"{self.name} without a parameter server",
                "Add one by --ps 1, or give each task a TF_CONFIG that lists one.",
            )
        if self.most_replicas is not None and replicas > self.most_replicas:
            raise UserError(
                f"{self.name} trains in {self.most_replicas} process, but {replicas} are asked for",
                f"Choose mirrored (one machine) or {default_name(2, 0)} (several).",
            )
        if self.one_machine and here < replicas:
            raise UserError(
                f"{self.name} is for one machine, but {here} of {replicas} replicas are on this "
                "one",
                f"Choose {default_name(2, 0)} for replicas on several machines.",
            )

    def check_inside(self, inside: StrategyInfo, chief: bool) -> None:
        """Raise `UserError` unless it can hold another strategy.

        Args:
            inside: what is known of that one.
            chief: whether a task of its own hands out the work, and computes nothing.
        """
        if not inside.nests or inside.name in self.cannot_hold:
            raise UserError(f"{self.name} cannot hold {inside.name}", self.do_hold(inside.name))
        if self.needs_servers and inside.divides_model and not chief:
            raise UserError(
                f"{self.name} with {inside.name} inside, and no chief of its own: who evaluates "
                "and saves has the whole model",
                "Add one that computes nothing: --chief.",
            )

    def do_hold(self, name: str) -> str:
        """What to say about ``name``, which this one cannot hold."""
        return nearest(name, [each for each in nesting_names() if each not in self.cannot_hold])

    def load(self) -> Any:
        """Import the class; raise `UserError` where it is not there."""
        module, _, name = self.implementation.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise UserError(
                f"{self.implementation} of the strategy {self.name!r} cannot be imported: {error}",
                "Fix or install the package that adds it.",
            ) from error


INSTEAD = {
    ("mesh", "data"): """Name both axes: mesh={"data": 2, "model": 2}.""",
    ("mesh", "inside"): "Write zero=1, 2 or 3 for sharded replicas along its axis 'data'.",
    ("pipeline", "inside"): """Write zero=1, 2 or 3 for sharded replicas of a stage, """
    """mesh={"pipeline": 2, "model": 2} for stages that are cut.""",
    ("pipeline", "data"): """Name all axes: mesh={"pipeline": 2, "data": 2}.""",
    ("pipeline", "model"): """Name all axes: mesh={"pipeline": 2, "model": 2}.""",
}
"""What to write for an option that other strategies have, by strategy and option."""


def other_option(strategy: str, option: str, known: Iterable[str]) -> str:
    """What to say about an option that a strategy does not have.

    Args:
        strategy: Its name.
        option: The name that came.
        known: The options that it has.
    """
    return INSTEAD.get((strategy, option)) or nearest(option, known)


OF_THE_JOB = (
    "device",
    "sync_batchnorm",
    "timeout",
    "communication",
    "flush_denormals",
    "recovery",
)
"""Options that hold for a whole job, whatever nests in it."""


def _of_the_job(*without: str) -> tuple[str, ...]:
    return tuple(option for option in OF_THE_JOB if option not in without)


BUILT_IN = {
    info.name: info
    for info in (
        StrategyInfo(
            "one_device",
            "spartito.strategies.one_device:OneDeviceStrategy",
            one_machine=True,
            most_replicas=1,
            options=OF_THE_JOB,
            nests=False,
            about="one process: to write and debug a model",
        ),
        StrategyInfo(
            "mirrored",
            "spartito.strategies.mirrored:MirroredStrategy",
            one_machine=True,
            recovers=True,
            options=("find_unused_parameters", *OF_THE_JOB),
            about="a copy in each process, one update together",
        ),
        StrategyInfo(
            "multi_worker_mirrored",
            "spartito.strategies.multi_worker_mirrored:MultiWorkerMirroredStrategy",
            recovers=True,
            options=("compress", "bucket_bytes", "find_unused_parameters", *OF_THE_JOB),
            about="the same over several machines",
        ),
        StrategyInfo(
            "tpu",
            "spartito.strategies.tpu:TPUStrategy",
            only_on="tpu",
            options=("fill", *OF_THE_JOB),
            about="the same on the chips of TPUs",
        ),
        StrategyInfo(
            "central_storage",
            "spartito.strategies.central_storage:CentralStorageStrategy",
            one_machine=True,
            shares_memory=True,
            options=("parameter_device", *_of_the_job("communication", "recovery")),
            nests=False,
            about="one copy in memory that all processes read",
        ),
        StrategyInfo(
            "mesh",
            "spartito.strategies.mesh:MeshStrategy",
            divides_model=True,
            recovers=True,
            options=(
                *("mesh", "layout", "names", "strict", "model", "zero", "block_bytes"),
                *("compress", *OF_THE_JOB),
            ),
            about="the tensors of one model, divided among tasks",
        ),
        StrategyInfo(
            "sharded",
            "spartito.strategies.sharded:ShardedStrategy",
            divides_model=True,
            recovers=True,
            options=("zero", "copies", "block_bytes", "offload", "compress", *OF_THE_JOB),
            about="parameters and optimizer state, divided among tasks",
        ),
        StrategyInfo(
            "pipeline",
            "spartito.strategies.pipeline:PipelineStrategy",
            divides_model=True,
            recovers=True,
            options=(
                *("stages", "microbatches", "schedule", "split"),
                *("mesh", "layout", "names", "strict", "zero", "compress"),
                *_of_the_job("sync_batchnorm"),
            ),
            about="the layers of one model, in stages",
        ),
        StrategyInfo(
            "local_sgd",
            "spartito.strategies.local_sgd:LocalSGDStrategy",
            options=(
                *("groups", "every", "outer", "weights", "compress", "fragments", "sites"),
                *("overlap", "mixing", "inside"),
                *OF_THE_JOB,
            ),
            recovers=True,
            nests=False,
            about="groups train apart and meet now and then",
        ),
        StrategyInfo(
            "parameter_server",
            "spartito.strategies.parameter_server:ParameterServerStrategy",
            needs_servers=True,
            asynchronous=True,
            recovers=True,
            options=(
                *("max_staleness", "on_stale", "aggregate", "groups", "every", "outer"),
                *("quorum", "weights", "inside", "servers"),
                *_of_the_job("sync_batchnorm", "communication"),
            ),
            nests=False,
            cannot_hold=("pipeline",),
            about="workers push gradients, servers update",
        ),
    )
}
"""Spartito's own strategies, from the simplest to the most involved."""


def strategy_names() -> tuple[str, ...]:
    """The names of all strategies: Spartito's own, the simplest first, then those of packages."""
    return (*BUILT_IN, *sorted(set(_added()) - set(BUILT_IN)))


def names_anywhere() -> tuple[str, ...]:
    """As `strategy_names`, without Spartito's own that are for one kind of devices."""
    apart = {name for name, info in BUILT_IN.items() if info.only_on is not None}
    return tuple(name for name in strategy_names() if name not in apart)


def nesting_names() -> tuple[str, ...]:
    """The strategies of Spartito's own that another one may have inside."""
    return tuple(name for name, info in BUILT_IN.items() if info.nests)


def strategy_info(name: str) -> StrategyInfo:
    """What is known of the strategy ``name``.

    Raises:
        UserError: nobody knows the name, two packages have it, or the entry point is wrong.
    """
    added = _added().get(name, ())
    if len(added) + (name in BUILT_IN) > 1:
        raise UserError(
            f"more than one strategy is called {name!r}: {', '.join(map(_source, added))}",
            "Uninstall what adds it to the entry points 'spartito.strategies'.",
        )
    if name in BUILT_IN:
        return BUILT_IN[name]
    if not added:
        raise UserError(f"{name!r} is not a strategy", nearest(name, strategy_names()))
    try:
        info = added[0].load()
    except Exception as error:
        raise UserError(
            f"the strategy {name!r} cannot be loaded from {_source(added[0])}: {error}",
            "Fix or uninstall the package.",
        ) from error
    if not isinstance(info, StrategyInfo) or info.name != name:
        raise UserError(
            f"the strategy {name!r}: {_source(added[0])} is no StrategyInfo of this name",
            "Its entry point must name a spartito.registry.StrategyInfo with the same name.",
        )
    return info


def default_name(replicas: int, servers: int) -> str:
    """The strategy of a cluster for which nobody named one."""
    if servers:
        return "parameter_server"
    return "multi_worker_mirrored" if replicas > 1 else "one_device"


def simplest_first(name: str) -> tuple[int, str]:
    """Sorts names of strategies from the simplest to the most involved; unknown ones come last."""
    order = list(BUILT_IN)
    return (order.index(name) if name in order else len(order), name)


def is_asynchronous(name: str) -> bool:
    """Whether replicas under ``name`` do not wait for each other; False for an unknown name."""
    return name in strategy_names() and strategy_info(name).asynchronous


@cache
def _all_points() -> Any:
    return entry_points()


def added_by_packages(group: str) -> EntryPoints:
    """The entry points of a ``group`` that installed packages have; they are read once."""
    found: EntryPoints = _all_points().select(group=group)
    return found


@cache
def _added() -> dict[str, tuple[EntryPoint, ...]]:
    """The entry points of installed packages, by name."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in added_by_packages(GROUP):
        others = found.get(point.name, ())
        if point.value not in [other.value for other in others]:  # installed twice on the path
            found[point.name] = (*others, point)
    return found


def _source(point: EntryPoint) -> str:
    package = f" of {point.dist.name}" if point.dist is not None else ""
    return f"{point.value}{package}"
