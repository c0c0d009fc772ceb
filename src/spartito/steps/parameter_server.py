"""Asynchronous training: workers compute on their own, parameter servers hold the values."""

from __future__ import annotations

import atexit
import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.checkpoint.saved import Saved
from spartito.cluster.limits import time_limit
from spartito.cluster.recovery import Recovery
from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import IdentityCollective
from spartito.data.batch import Batch
from spartito.data.dataset import Dataset, as_dataset
from spartito.data.loader import Loader
from spartito.engine.batchnorm import has_batchnorm
from spartito.engine.buffers import listed, watched
from spartito.engine.denormals import flushed
from spartito.engine.loss import LossFunction, WeightedLoss
from spartito.engine.optimizers import OptimizerLike, has_sparse_gradients, named_state, unwrap
from spartito.errors import UserError
from spartito.heartbeat import CONNECT, during
from spartito.local.outer import Outer
from spartito.local.plan import TOKENS, Asked
from spartito.names import PRECISIONS
from spartito.ps.job import Job, Options, workers_of
from spartito.ps.protocol.codec import check_wire_dtype
from spartito.ps.protocol.options import set_options
from spartito.ps.protocol.rules import Rules
from spartito.ps.scheduler.plan import Plan
from spartito.steps import own_states
from spartito.steps.decoupled import (
    EVERY,
    Apart,
    apart,
    check_length,
    members_of,
    tell_of_statistics,
)
from spartito.steps.distributed import Distributed, StepResult
from spartito.steps.ending import serve_and_end, uncaught
from spartito.steps.group_pusher import GroupPusher
from spartito.steps.in_groups import InGroups
from spartito.steps.leased import LeasedCoordination
from spartito.steps.leases import Leased
from spartito.steps.member_links import joined
from spartito.steps.pair import Pair, check_unchanged
from spartito.steps.pusher import Pusher
from spartito.steps.sharing import Placed

T = TypeVar("T")

START_SECONDS = 60.0  # that a chief waits for workers which start more slowly


class ParameterServerStep(InGroups):
    """What a task does of each step under `ParameterServerStrategy`."""

    name = "parameter_server"

    def __init__(
        self,
        *,
        cluster: ClusterSpec | None = None,
        max_staleness: int | None = None,
        on_stale: str = "wait",
        compensation: float | None = None,
        mean_square: float | None = None,
        aggregate: int = 1,
        groups: Asked | None = None,
        every: int = EVERY,
        outer: Outer = None,
        quorum: int = 1,
        grace: float = 0.0,
        weights: str = TOKENS,
        replicas: int = 1,
        min_shard_bytes: int = 256 << 10,
        wire_dtype: str | None = None,
        device: torch.device | str | None = None,
        timeout: float | None = None,
        lease_seconds: float = 10.0,
        snapshot_seconds: float = 10.0,
        snapshot_dir: str | None = None,
        nan_limit: int = 100,
        push_log: str | None = None,
        shared_memory: bool = True,
        flush_denormals: bool = True,
        recovery: Recovery | None = None,
    ) -> None:
        rules = Rules(
            0, max_staleness, on_stale, aggregate,
            compensation=compensation, mean_square=mean_square,
        )  # fmt: skip
        self._options = Options(
            min_shard_bytes=min_shard_bytes,
            wire_dtype=check_wire_dtype(wire_dtype),
            timeout=time_limit(timeout),
            lease_seconds=lease_seconds,
            snapshot_seconds=snapshot_seconds,
            snapshot_dir=snapshot_dir,
            nan_limit=nan_limit,
            push_log=push_log,
            shared_memory=shared_memory,
            recovery=Recovery.from_environment() if recovery is None else recovery,
        )
        super().__init__(cluster, device, False, flush_denormals)
        if self._options.recovery is not None and "chief" not in self.job.addresses:
            raise UserError(
                "recovery under parameter_server, where a worker is the chief, which cannot be "
                "replaced",
                "Add a chief that computes nothing (--chief), or leave it out.",
            )
        if self.task.type == "ps":
            self.device = torch.device("cpu")
        servers = len(self.cluster.addresses.get("ps", ()))
        if replicas > 1 and push_log:
            raise UserError(
                f"push_log={push_log!r} with replicas={replicas}",
                "A server that copies from another has no record of the updates before: "
                "leave one of them out.",
            )
        whole = self.job if self.is_evaluator else self.cluster
        self._workers = workers_of(whole)
        asked = Apart(every, outer, quorum, grace, weights)
        self._groups_apart = apart(groups, asked, rules, whole, self._workers)
        self._members = members_of(self._groups_apart, self._workers)
        self._rules = dataclasses.replace(
            rules, workers=len(self._members), servers=servers, replicas=replicas
        )
        self._check_device()
        if self._groups_apart is not None:
            self._rules = dataclasses.replace(
                self._rules, every=every, quorum=quorum, grace=float(grace)
            )
        self.coordination: LeasedCoordination = LeasedCoordination(
            self.name, self.job, self.cluster, self._pairs, self._rules.workers
        )
        self._loss: LossFunction | None = None
        self._deterministic = self._planned = False
        atexit.register(self.close)

    @property
    def data_shard(self) -> tuple[int, int]:
        """All of a batch: no worker waits for another, each computes what is leased to it."""
        return 0, 1

    @property
    def num_replicas(self) -> int:
        """One on each worker."""
        return self.cluster.num_computing

    @flushed  # a ps serves in it: its threads inherit that
    def prepare(
        self,
        model: nn.Module,
        optimizer: OptimizerLike,
        *,
        accumulate: int = 1,
        clip_norm: float | None = None,
        precision: str = "fp32",
        deterministic: bool = False,
        seed: int = 0,
    ) -> tuple[nn.Module, Optimizer]:
        """As `Step.prepare`; a ps serves here until the job ends, and then exits with 0."""
        if self._pairs.all:
            raise UserError(
                "a second model under parameter_server",
                "It serves one model with one optimizer; a synchronous strategy takes several.",
            )
        if PRECISIONS.get(precision) == "fp16":
            raise UserError(
                "precision='fp16' under parameter_server",
                "Workers would scale their losses apart. Choose 'bf16', or a synchronous strategy.",
            )
        if has_sparse_gradients(model):
            raise UserError(
                "sparse gradients under parameter_server",
                "Gradients are sent as dense tensors: build the Embedding with sparse=False.",
            )
        means = self._rules.together or self._rules.aggregate > 1
        self._deterministic = deterministic
        if deterministic:
            self._rules.check_deterministic(has_batchnorm(model))
        self._enter_group(self._options)
        if self.is_chief:
            tell_of_statistics(self._rules, model)
        if clip_norm is not None and means:
            self._rules = self._rules.clipping_means(clip_norm, self._rules.spans)
        found = super().prepare(
            model,
            optimizer,
            accumulate=accumulate,
            clip_norm=None if means else clip_norm,
            precision=precision,
            deterministic=deterministic,
            seed=seed,
        )
        # Its steps are made on the servers: torch need not warn of schedules before the first.
        found[1]._opt_called = True  # type: ignore[attr-defined]
        self._join(self._pairs.only)
        return found

    def distribute(
        self, dataset: Any, *, seed: int | None = None, training: bool = True
    ) -> Distributed:
        chain = as_dataset(dataset)
        order = self._seed if seed is None else seed
        if training and self.coordination.pusher is not None:
            return Leased(self, self._divisible(chain, self._rules.workers), order)
        batches = Loader(chain, (0, 1), order)
        alone = IdentityCollective()  # the chief evaluates by itself
        return Placed(batches, self.device, self.enter, alone, self.denormals)

    def step(self, batch: Batch, loss: LossFunction | None, *, stop: bool = False) -> StepResult:
        if self.inside.several:
            self.coordination.computing.stops |= stop  # the others hear of it in the update
        else:
            self.coordination.agree_to_stop(stop)
        self.coordination.announce_options()
        self.coordination.computing.repeats, self._loss = True, loss
        return super().step(batch, loss)

    def _forward(
        self, pair: Pair, batch: Batch, loss: LossFunction | None
    ) -> tuple[Any, WeightedLoss]:
        if not (self._deterministic and self._divides):
            return super()._forward(pair, batch, loss)
        with watched(unwrap(pair.model)) as changed:
            found = super()._forward(pair, batch, loss)
        if changed:
            raise UserError(
                f"deterministic training under parameter_server with {listed(changed)}, which the "
                "forward pass changes",
                "Workers see their own rows and do not meet there: leave deterministic out, or "
                "compute from all rows (strategy.reduce) under mirrored.",
            )
        return found

    def flush(self) -> StepResult | None:
        return self.coordination.progress()  # all is pushed: what others did comes in

    def backward(self, losses: Any, batch: Batch) -> None:
        pair = self._pairs.only
        self.coordination.computing.repeats = False
        if pair.accumulate > 1:
            if self._are_summed_later:
                check_unchanged(pair)
            pair.gradients.backward_calls = 0  # the batches of one update are one mean
        else:
            self._check_backward()
        super().backward(losses, batch)
        pair.passes += 1

    @flushed
    def update(self, optimizer: Optimizer) -> None:
        pair = self._pairs.of(optimizer)
        self._check_computed(pair)
        if self._is_due(pair):
            self.coordination.announce_options()
            self._update(pair, None, 0, False)

    def _state(self, pair: Pair) -> dict[str, Any]:
        if self._groups_apart is not None:
            return own_states.saved(self.coordination, pair, self._served, self._rules.in_step)
        served = self.coordination.fetch()
        model = unwrap(pair.model)
        optimizer = named_state(model, pair.optimizer)
        if served is not None:
            set_options(optimizer["groups"], served)
        pair.optimizer.state.clear()  # it lives on the servers
        return {"model": dict(model.state_dict()), "optimizer": optimizer}

    def _load(self, saved: Saved) -> None:
        whole = "optimizer" in saved
        if self.coordination.chief is not None and not whole:
            given = {section: saved.whole(section) for section in saved}
            if self._groups_apart is None:
                now = self.state_dict()
            else:
                now = own_states.merged(self.coordination, self._pairs.only, self._served)
            saved = Saved.of({**now, **given})  # the servers keep theirs
        super()._load(saved)
        if self._groups_apart is not None:
            pair, index = self._pairs.only, self._group_index
            own_states.loaded(self.coordination, pair, self._served, saved, whole, index)
        self.coordination.give()
        self._served.state.clear()

    def close(self) -> None:
        """Leave the job; the chief ends it once the workers have left."""
        self._let_go()
        self.coordination.failed(uncaught())
        atexit.unregister(self.close)
        self.coordination.leave()

    # What the leases ask for

    def plan(self, chain: Dataset, count: int, steps: int | None) -> Plan:
        """How a stream is divided into work items.

        Args:
            chain: What is trained on.
            count: How many epochs.
            steps: Global batches of an epoch; None: all there are.

        Returns:
            The plan by which the chief leases them.
        """
        every = self._rules.every
        if not self._planned:
            check_length(every, steps or chain.steps_per_epoch, self._pairs.only.accumulate)
        self._planned = True
        return Plan(
            data_shards=self._rules.workers,
            steps_per_pass=chain.steps_per_pass,
            passes_per_epoch=chain.repeats,
            epoch_steps=steps,
            epochs=count,
            gated=self._rules.in_step or (self._rules.max_staleness is not None and not every),
            together=self._rules.together,
            multiple=self._pairs.only.accumulate * max(1, every),
            accumulate=self._pairs.only.accumulate,
            fixed_length=self._deterministic or every > 0,
        )

    # Inside: one step

    @property
    def _are_summed_later(self) -> bool:
        rules = self._rules  # a push on its own is a whole update
        return self.inside.several or (
            rules.workers > 1 and (rules.together or rules.aggregate > 1)
        )

    def _is_due(self, pair: Pair) -> bool:
        current = self.coordination.computing.current
        return super()._is_due(pair) or (current is not None and current.is_last)

    def _update(self, pair: Pair, output: Any, examples: int, stop: bool) -> StepResult:
        loss, weight = self.coordination.computing.push()
        if self.inside.several and self.coordination.computing.stops:
            self.coordination.agree_to_stop(True)
        return self.coordination.progress(output, loss, weight)

    def _again(self, batch: Batch) -> Any:
        return self._compute(self._pairs.only, batch, self._loss)

    # Inside: the job

    def _share(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """The chief's values come by the servers."""

    def _join(self, pair: Pair) -> None:
        """Join the job: a ps serves, all others return with connections."""
        self._served = (
            pair.optimizer
            if self._groups_apart is None
            else self._groups_apart.optimizer(pair.optimizer)
        )
        if self.is_evaluator:
            return
        model, inside, options = unwrap(pair.model), self.inside, self._options
        job = Job(self.cluster, self._rules, options, model, self._served, self._speakers)
        coordination = self.coordination
        if self.task.type == "ps":
            serve_and_end(job, coordination.record_to)
        with during(CONNECT):
            chief = job.begin() if self.is_chief else None
            grouped = self.in_groups and self._group_index >= 0
            work, servers = joined(job, chief, inside, grouped)
            if self._groups_apart is None:
                pusher = Pusher(pair, servers, self._rules, self._again)
            else:
                weights = self._groups_apart.weights
                pusher = GroupPusher(
                    pair, servers, self._rules, self._again, work, weights, coordination, inside
                )
            coordination.join(job, chief, work, pusher, inside)
            if chief is not None:
                chief.gather(min(START_SECONDS, self._options.timeout))
