"""The types for who writes a strategy, a metric, a callback, a launcher or a resolver."""

from typing import TYPE_CHECKING

from spartito._lazy import attach as _attach

if TYPE_CHECKING:
    from spartito.cluster.resolver import Resolver
    from spartito.cluster.spec import ClusterSpec, Task
    from spartito.collectives.collective import Collective, Traffic
    from spartito.collectives.rendezvous import Rendezvous
    from spartito.data.batch import Batch
    from spartito.engine.loss import LossFunction
    from spartito.engine.optimizers import OptimizerLike
    from spartito.launch.job import JobSpec, Launcher
    from spartito.registry import StrategyInfo
    from spartito.strategies.base import Strategy
    from spartito.strategies.coordination import Coordination, SynchronousCoordination
    from spartito.strategies.distributed import Distributed, Figures, StepResult
    from spartito.strategies.groups import Groups
    from spartito.strategies.replica import ReplicaStrategy
    from spartito.strategies.synchronous import SynchronousStrategy
    from spartito.training.callback import Callback, Logs, Training
    from spartito.training.callbacks.loggers import Logger
    from spartito.training.metrics.base import Metric, State, Value
    from spartito.training.metrics.classification import ClassMetric
    from spartito.training.metrics.mean import MetricFunction

__getattr__ = _attach(
    __name__,
    {
        "Batch": "spartito.data.batch",
        "Callback": "spartito.training.callback",
        "ClassMetric": "spartito.training.metrics.classification",
        "ClusterSpec": "spartito.cluster.spec",
        "Collective": "spartito.collectives.collective",
        "Coordination": "spartito.strategies.coordination",
        "Distributed": "spartito.strategies.distributed",
        "Figures": "spartito.strategies.distributed",
        "Groups": "spartito.strategies.groups",
        "JobSpec": "spartito.launch.job",
        "Launcher": "spartito.launch.job",
        "Logger": "spartito.training.callbacks.loggers",
        "Logs": "spartito.training.callback",
        "LossFunction": "spartito.engine.loss",
        "Metric": "spartito.training.metrics.base",
        "MetricFunction": "spartito.training.metrics.mean",
        "OptimizerLike": "spartito.engine.optimizers",
        "Rendezvous": "spartito.collectives.rendezvous",
        "ReplicaStrategy": "spartito.strategies.replica",
        "Resolver": "spartito.cluster.resolver",
        "State": "spartito.training.metrics.base",
        "StepResult": "spartito.strategies.distributed",
        "Strategy": "spartito.strategies.base",
        "StrategyInfo": "spartito.registry",
        "SynchronousCoordination": "spartito.strategies.coordination",
        "SynchronousStrategy": "spartito.strategies.synchronous",
        "Task": "spartito.cluster.spec",
        "Traffic": "spartito.collectives.collective",
        "Training": "spartito.training.callback",
        "Value": "spartito.training.metrics.base",
    },
)

__all__ = [
    "Batch",
    "Callback",
    "ClassMetric",
    "ClusterSpec",
    "Collective",
    "Coordination",
    "Distributed",
    "Figures",
    "Groups",
    "JobSpec",
    "Launcher",
    "Logger",
    "Logs",
    "LossFunction",
    "Metric",
    "MetricFunction",
    "OptimizerLike",
    "Rendezvous",
    "ReplicaStrategy",
    "Resolver",
    "State",
    "StepResult",
    "Strategy",
    "StrategyInfo",
    "SynchronousCoordination",
    "SynchronousStrategy",
    "Task",
    "Traffic",
    "Training",
    "Value",
]
