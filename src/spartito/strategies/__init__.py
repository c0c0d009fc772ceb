"""Every way to distribute training, by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import signature
from typing import Any

from spartito.cluster.resolver import remarks, resolve, starter
from spartito.declared import INSIDE, Declared, declared_by, parse
from spartito.errors import UserError
from spartito.names import ENV_STRATEGY, ENV_STRATEGY_OPTIONS, plural
from spartito.notes import note
from spartito.registry import default_name, other_option, strategy_info
from spartito.steps.distributed import StepResult
from spartito.strategies.central_storage import CentralStorageStrategy
from spartito.strategies.declaration import Strategy
from spartito.strategies.local_sgd import LocalSGDStrategy
from spartito.strategies.mesh import MeshStrategy
from spartito.strategies.mirrored import MirroredStrategy
from spartito.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from spartito.strategies.one_device import OneDeviceStrategy
from spartito.strategies.parameter_server import ParameterServerStrategy
from spartito.strategies.pipeline import PipelineStrategy
from spartito.strategies.sharded import ShardedStrategy
from spartito.strategies.tpu import TPUStrategy


def strategy(name: str | None = None, **options: Any) -> Strategy:
    """The strategy that was asked for.

    Without a name that is ``SPARTITO_STRATEGY``, as `spartito run` sets it, with the options in
    ``SPARTITO_STRATEGY_OPTIONS`` (a JSON object) on top; else the cluster decides: a ps in it
    means parameter_server, several processes multi_worker_mirrored, one means one_device.

    Args:
        name: One of Spartito's own, or one that a package adds; with options in parentheses if
            you like, as ``local_sgd(every=20, inside=sharded(zero=2))``.
        **options: Keyword arguments of its class; they win.

    Returns:
        A strategy that is not connected yet.

    Raises:
        UserError: For an unknown name or option, or a cluster on which it cannot run.
    """
    cluster = resolve()
    default = default_name(cluster.world_size, len(cluster.addresses.get("ps", ())))
    asked = declared_by(os.environ, default) if name is None else parse(name)
    if isinstance(options.get(INSIDE), str | Declared):
        asked = asked.with_options({INSIDE: options.pop(INSIDE)})
    kind = strategy_class(asked.name)
    options = {**asked.options, **options}
    _check_options(kind, options)
    made: Strategy = kind(cluster=cluster, **options)
    made.engine  # noqa: B018 - which refuses what the job cannot have
    if made.is_chief:
        count, tasks = made.num_replicas, cluster.num_computing
        spread = f" on {tasks} tasks" if tasks > count else ""
        note("%s, %s%s (%s)", made, plural(count, "replica"), spread, starter(cluster))
        for remark in remarks(cluster):
            note("%s", remark)
    return made


_of_the_job: dict[str, Strategy] = {}


def job_strategy() -> Strategy:
    """The strategy of trainers that were given none.

    They share one in each process of a job, until it is closed: two would listen at one address.
    It keeps all models that they prepare. A process alone makes one for each.
    """
    cluster = resolve()
    if cluster.world_size == 1 and not cluster.addresses.get("ps"):
        return strategy()
    asked = repr((cluster, *map(os.environ.get, (ENV_STRATEGY, ENV_STRATEGY_OPTIONS))))
    known = _of_the_job.get(asked)
    if known is None or known.engine.groups.is_closed:
        known = _of_the_job[asked] = strategy()
    return known


def strategy_class(name: str) -> Callable[..., Strategy]:
    """The class of the strategy ``name``; `UserError` where it has none."""
    info = strategy_info(name)
    kind = info.load()
    if not (isinstance(kind, type) and issubclass(kind, Strategy) and kind.name == name):
        raise UserError(
            f"{info.implementation} is not a spartito.Strategy of the name {name!r}",
            "Fix the package that adds it.",
        )
    return kind


def _check_options(kind: Callable[..., Strategy], options: dict[str, Any]) -> None:
    known = [option for option in signature(kind).parameters if option != "cluster"]
    for option in options:
        if option not in known:
            name = str(getattr(kind, "name", kind))
            raise UserError(f"{name} has no option {option!r}", other_option(name, option, known))


__all__ = [
    "CentralStorageStrategy",
    "LocalSGDStrategy",
    "MeshStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "ShardedStrategy",
    "PipelineStrategy",
    "StepResult",
    "Strategy",
    "TPUStrategy",
    "strategy",
]
