"""The types for who writes a strategy, a metric, a callback, a launcher or a resolver."""

from typing import TYPE_CHECKING

from spartito._lazy import attach as _attach

if TYPE_CHECKING:
    from spartito.cluster.resolver import Resolver
    from spartito.cluster.spec import ClusterSpec, Task
    from spartito.collectives.collective import Collective, Traffic
    from spartito.collectives.membership.rendezvous import Rendezvous
    from spartito.data.batch import Batch
    from spartito.engine.losses.loss import LossFunction
    from spartito.engine.updates.optimizers import OptimizerLike
    from spartito.launch.job import JobSpec, Launcher
    from spartito.registry import StrategyInfo
    from spartito.steps.coordination import Coordination, SynchronousCoordination
    from spartito.steps.distributed import Distributed, Figures, StepResult
    from spartito.steps.exchanges.all_reduce import AllReduce
    from spartito.steps.exchanges.sharded import Sharded
    from spartito.steps.groups import Groups
    from spartito.steps.outer_loops.outer_loop import OuterLoop
    from spartito.steps.parts import Exchange, Parts, Placement, Settings, Whole
    from spartito.steps.placements.computation import Computation, WholeModel
    from spartito.steps.placements.replicated import Replicated
    from spartito.steps.placements.tensor_parallel import TensorParallel
    from spartito.steps.prepared import Pair
    from spartito.steps.recovery import Recovering
    from spartito.steps.step import Step
    from spartito.steps.team import Team
    from spartito.steps.topology import Grid, OneShardEach, Topology
    from spartito.strategies import Strategy
    from spartito.training.callback import Callback, Logs, Training
    from spartito.training.callbacks.loggers import Logger
    from spartito.training.metrics.base import Metric, State, Value
    from spartito.training.metrics.classification import ClassMetric
    from spartito.training.metrics.mean import MetricFunction

__getattr__ = _attach(
    __name__,
    {
        "AllReduce": "spartito.steps.exchanges.all_reduce",
        "Batch": "spartito.data.batch",
        "Callback": "spartito.training.callback",
        "ClassMetric": "spartito.training.metrics.classification",
        "ClusterSpec": "spartito.cluster.spec",
        "Collective": "spartito.collectives.collective",
        "Computation": "spartito.steps.placements.computation",
        "Coordination": "spartito.steps.coordination",
        "Distributed": "spartito.steps.distributed",
        "Exchange": "spartito.steps.parts",
        "Figures": "spartito.steps.distributed",
        "Grid": "spartito.steps.topology",
        "Groups": "spartito.steps.groups",
        "JobSpec": "spartito.launch.job",
        "Launcher": "spartito.launch.job",
        "Logger": "spartito.training.callbacks.loggers",
        "Logs": "spartito.training.callback",
        "LossFunction": "spartito.engine.losses.loss",
        "Metric": "spartito.training.metrics.base",
        "MetricFunction": "spartito.training.metrics.mean",
        "OneShardEach": "spartito.steps.topology",
        "OptimizerLike": "spartito.engine.updates.optimizers",
        "OuterLoop": "spartito.steps.outer_loops.outer_loop",
        "Pair": "spartito.steps.prepared",
        "Parts": "spartito.steps.parts",
        "Placement": "spartito.steps.parts",
        "Recovering": "spartito.steps.recovery",
        "Rendezvous": "spartito.collectives.membership.rendezvous",
        "Replicated": "spartito.steps.placements.replicated",
        "Resolver": "spartito.cluster.resolver",
        "Settings": "spartito.steps.parts",
        "Sharded": "spartito.steps.exchanges.sharded",
        "State": "spartito.training.metrics.base",
        "Step": "spartito.steps.step",
        "StepResult": "spartito.steps.distributed",
        "Strategy": "spartito.strategies",
        "StrategyInfo": "spartito.registry",
        "SynchronousCoordination": "spartito.steps.coordination",
        "Task": "spartito.cluster.spec",
        "Team": "spartito.steps.team",
        "TensorParallel": "spartito.steps.placements.tensor_parallel",
        "Topology": "spartito.steps.topology",
        "Traffic": "spartito.collectives.collective",
        "Training": "spartito.training.callback",
        "Value": "spartito.training.metrics.base",
        "Whole": "spartito.steps.parts",
        "WholeModel": "spartito.steps.placements.computation",
    },
)

__all__ = [
    "AllReduce",
    "Batch",
    "Callback",
    "ClassMetric",
    "ClusterSpec",
    "Collective",
    "Computation",
    "Coordination",
    "Distributed",
    "Exchange",
    "Figures",
    "Grid",
    "Groups",
    "JobSpec",
    "Launcher",
    "Logger",
    "Logs",
    "LossFunction",
    "Metric",
    "MetricFunction",
    "OneShardEach",
    "OptimizerLike",
    "OuterLoop",
    "Pair",
    "Parts",
    "Placement",
    "Recovering",
    "Rendezvous",
    "Replicated",
    "Resolver",
    "Settings",
    "Sharded",
    "State",
    "Step",
    "StepResult",
    "Strategy",
    "StrategyInfo",
    "SynchronousCoordination",
    "Task",
    "Team",
    "TensorParallel",
    "Topology",
    "Traffic",
    "Training",
    "Value",
    "Whole",
    "WholeModel",
]
