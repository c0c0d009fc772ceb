"""The steps of workers that compute on their own, while parameter servers hold the values."""

from __future__ import annotations

import atexit
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.checkpoint.saved_state import Saved
from spartito.checkpoint.saving import Tasks, Unwritten
from spartito.cluster.spec import ClusterSpec, Task
from spartito.collectives.collective import Collective, IdentityCollective
from spartito.collectives.membership.placement import Placement
from spartito.collectives.membership.rendezvous import Part, Rendezvous
from spartito.data.batch import Batch
from spartito.data.dataset import Dataset, as_dataset
from spartito.data.reading.loader import Loader
from spartito.data.reading.placing import Placing
from spartito.engine.devices.denormals import flushed
from spartito.engine.gradients.gradient_sum import Gradients, reduced
from spartito.engine.logged import listening
from spartito.engine.losses.loss import LossFunction
from spartito.engine.modules.batchnorm import has_batchnorm
from spartito.engine.modules.buffers import in_words, watched
from spartito.engine.updates import divided_state, optimizer_step
from spartito.engine.updates.optimizers import (
    OptimizerLike,
    check_by_parameter,
    has_hooks,
    has_sparse_gradients,
    named_state,
    unwrap,
)
from spartito.errors import UserError
from spartito.heartbeat import CONNECT, during, in_group
from spartito.names import PRECISIONS
from spartito.outer.group_values import Values
from spartito.outer.groups import Asked, Members
from spartito.outer.joined_groups import JoinedGroups
from spartito.ps.client.pulled_values import PulledValues
from spartito.ps.job import Job, Options, workers_of
from spartito.ps.protocol.options import set_options
from spartito.ps.protocol.rules import Rules
from spartito.ps.scheduler.plan import Plan
from spartito.steps.batches import Placed
from spartito.steps.coordination import Agreement, Alike
from spartito.steps.distributed import Distributed, StepResult
from spartito.steps.groups import ALIKE, DATA, MODEL, REPLICAS, SHARDS, Groups
from spartito.steps.parts import Exchange, Parts, Prepared, Settings, State, Whole
from spartito.steps.prepared import Pair, check_unchanged
from spartito.steps.servers import group_state
from spartito.steps.servers.coordination import LeasedCoordination
from spartito.steps.servers.group_member import NAME, Inside
from spartito.steps.servers.group_member_links import joined
from spartito.steps.servers.group_model import EqualModels, GroupModel, ModelInParts
from spartito.steps.servers.group_push import GroupPusher, Member, Reduced
from spartito.steps.servers.groups import Apart, apart, check_length, members_of, tell_of_statistics
from spartito.steps.servers.leased_batches import Leased
from spartito.steps.servers.push import Pusher, ServedGradients
from spartito.steps.servers.served_state import ours, watch_state
from spartito.steps.step import Step
from spartito.steps.task_end import serve_and_end, uncaught
from spartito.steps.team import Team

START_SECONDS = 60.0  # that a chief waits for workers which start more slowly


@dataclass(frozen=True)
class Service:
    """What servers do with what workers push, and which of these are a group.

    Args:
        rules: How pushes become updates.
        options: Of the job.
        apart: How groups train apart; None: workers push gradients.
        workers: The tasks that compute.
        members: The workers of each group, by their indices.
    """

    rules: Rules
    options: Options
    apart: Apart | None
    workers: Sequence[Task]
    members: Members

    @classmethod
    def of(
        cls,
        team: Team,
        rules: Rules,
        options: Options,
        groups: Asked | None,
        asked: Apart,
    ) -> Service:
        """What was asked for of a job.

        Args:
            team: Its tasks.
            rules: How pushes become updates, but for what the job decides.
            options: Of the job.
            groups: As under `ParameterServerStrategy`.
            asked: How these train apart.

        Raises:
            UserError: For what cannot be.
        """
        if options.recovery is not None and "chief" not in team.job.addresses:
            raise UserError(
                "recovery under parameter_server, where a worker is the chief, which cannot be "
                "replaced",
                "Add a chief that computes nothing (--chief), or leave it out.",
            )
        if options.replicas > 1 and options.push_log:
            raise UserError(
                f"push_log={options.push_log!r} with replicas={options.replicas}",
                "A server that copies from another has no record of the updates before: "
                "leave one of them out.",
            )
        whole = team.job if team.job.is_evaluator else team.cluster
        workers = workers_of(whole)
        found = apart(groups, asked, rules, whole, workers)
        members = members_of(found, workers)
        servers = len(team.cluster.addresses.get("ps", ()))
        rules = dataclasses.replace(
            rules, workers=len(members), servers=servers, replicas=options.replicas
        )
        service = cls(rules, options, found, workers, members)
        if found is None:
            return service
        rules = dataclasses.replace(
            rules, every=asked.every, quorum=asked.quorum, grace=float(asked.grace)
        )
        return dataclasses.replace(service, rules=rules)

    @property
    def in_groups(self) -> bool:
        """Whether a group has several workers."""
        return len(self.members) < len(self.workers)

    @property
    def speakers(self) -> list[Task]:
        """The first member of each group."""
        return [self.workers[members[0]] for members in self.members]

    def group_of(self, task: Task) -> int:
        """The number of the group of a task; -1 in none.

        Args:
            task: Any of the job.
        """
        own = self.workers.index(task) if task in self.workers else -1
        return next((g for g, members in enumerate(self.members) if own in members), -1)


class ServedTeam(Team):
    """Workers that never meet: to the servers a group of several is one.

    Gradients, BatchNorm and draws are those of one's own group, which `inside` joins.
    """

    coordination: LeasedCoordination
    inside: Inside = Inside.alone()
    """One's own group; alone before the groups are made."""
    group: ClusterSpec | None = None
    """The tasks of one's own group, where it trains apart."""
    service: Service
    served: Optimizer
    """The optimizer that the servers run, which has no state here."""

    @property
    def tasks(self) -> ClusterSpec:
        """As `Team.tasks`."""
        return self.group or self.cluster

    @property
    def member(self) -> tuple[int, int]:
        """Which rows of what its group does are this task's, as (index, count)."""
        return (0, 1) if self.group is None else self.own_shard

    @property
    def called(self) -> str:
        """As `Team.called`."""
        return "parameter_server"

    def form(self, parts: Parts) -> None:
        """As `Team.form`: they agree by what the chief decides."""
        self.topology = parts.topology
        self.coordination = LeasedCoordination(
            self.called, self.job, self.cluster, self.pairs, self.service.rules.workers
        )

    def enter_group(self) -> None:
        """Meet one's own group, whose members all call this, if it trains apart."""
        if self.group is None:
            return
        options, several = self.service.options, self.group.world_size > 1
        # The first one's port may be the coordinator's, so the second one keeps the store.
        rendezvous = Rendezvous(
            self.group, self.device, options.timeout,
            "auto" if options.shared_memory else "sockets", keeper=1 if several else None,
        )  # fmt: skip
        self.groups = Groups(rendezvous, self.group, self._connect)
        if several:
            in_group(self.service.group_of(self.job.task) + 1)
            self.inside = Inside.connect(self.groups, rendezvous, options.lease_seconds)

    def _connect(self, rendezvous: Rendezvous, group: ClusterSpec) -> Mapping[str, Collective]:
        """As `Topology.connect`, inside of one's own group."""
        there = cast("Rendezvous", Part(rendezvous, NAME, range(group.world_size)))
        found = self.topology.connect(there, group)
        shards = found.get(SHARDS)
        alike = shards is not None and shards.world_size > 1 and found[MODEL].world_size == 1
        alone = {ALIKE: IdentityCollective()} if alike else {}  # servers join what groups have
        return {REPLICAS: found[DATA], **found, **alone}

    def meet(self) -> None:
        """As `Team.meet`."""
        if self.group is not None:
            self.replicas, self.model = self.groups.replicas, self.groups.model

    @property
    def data_shard(self) -> tuple[int, int]:
        """All of a batch: no worker waits for another, each computes what is leased to it."""
        return 0, 1

    @property
    def num_replicas(self) -> int:
        """One on each worker."""
        return self.cluster.num_computing

    @property
    def several(self) -> bool:
        """As `Team.several`; a push on its own is a whole update."""
        rules = self.service.rules
        means = rules.workers > 1 and (rules.together or rules.aggregate > 1)
        return self.inside.several or means

    @property
    def runs_without_rows(self) -> bool:
        """As `Division.runs_without_rows`."""
        return self.inside.several

    def divisor(self, batch: Batch) -> float:
        """As `Division.divisor`.

        Args:
            batch: That of all members of a group.
        """
        if self.inside.several:
            return float(batch.global_size or 1)  # all members know it
        return float(batch.size or 1)  # a push is the mean over its own examples

    def is_so_for_one(self, found: bool) -> bool:
        """As `Division.is_so_for_one`: who evaluates has all rows.

        Args:
            found: Whether it is so here.
        """
        return found


class ToServers(Whole):
    """The exchange of a worker whose gradients go to servers as they are."""

    agreement = Alike()
    brings = divides = False
    fraction = 0.0

    def check(self, optimizer: object, settings: Settings) -> None:
        """As `Exchange.check`: what the servers can, `ServedStep` has checked."""

    def begin(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """As `Exchange.begin`: the chief's values come by the servers."""

    def gradients(self, model: nn.Module, optimizer: Optimizer) -> Prepared:
        """As `Exchange.gradients`."""
        return model, ServedGradients(optimizer)

    def stepping(self, pair: Pair) -> AbstractContextManager[None]:
        """As `Exchange.stepping`."""
        return nullcontext()

    def optimize(self, pair: Pair) -> None:
        """As `Exchange.optimize`: the servers do."""

    def values(self, pair: Pair, column: JoinedGroups, whole: Callable[[], Values]) -> Values:
        """As `Exchange.values`."""
        return whole()


class Push:
    """The exchange with servers, around the one inside of a group: they have what is saved.

    Args:
        team: The workers.
        inner: How the members of a group make an update, or what a worker pushes.
    """

    def __init__(self, team: ServedTeam, inner: Exchange) -> None:
        self._team, self.inner = team, inner
        self.check, self.begin, self.gradients = inner.check, inner.begin, inner.gradients
        self.stepping, self.optimize, self.values = inner.stepping, inner.optimize, inner.values
        self.cuts, self.owned, self.showing = inner.cuts, inner.owned, inner.showing

    @property
    def agreement(self) -> Agreement:
        """As `Exchange.agreement`."""
        return self.inner.agreement

    @property
    def brings(self) -> bool:
        """As `Exchange.brings`."""
        return self.inner.brings

    @property
    def divides(self) -> bool:
        """As `Exchange.divides`."""
        return self.inner.divides

    @property
    def fraction(self) -> float:
        """As `Exchange.fraction`."""
        return self.inner.fraction

    def save(self, pair: Pair, state: Callable[[], State]) -> State:
        """As `Held.save`: what the servers have."""
        with ours():
            return self.inner.save(pair, lambda: self._saved(pair))

    def _saved(self, pair: Pair) -> State:
        coordination, served = self._team.coordination, self._team.served
        if self._team.service.apart is not None:
            in_step = self._team.service.rules.in_step
            return group_state.saved(coordination, pair, served, in_step)
        options = coordination.fetch()
        model = unwrap(pair.model)
        optimizer = named_state(model, pair.optimizer)
        if options is not None:
            set_options(optimizer["groups"], options)
        pair.optimizer.state.clear()  # it lives on the servers
        return {"model": dict(model.state_dict()), "optimizer": optimizer}

    def load(self, pair: Pair, saved: Saved, load: Callable[[Saved], None]) -> None:
        """As `Held.load`, and to the servers."""
        team, coordination, whole = self._team, self._team.coordination, "optimizer" in saved
        apart = team.service.apart is not None
        if coordination.chief is not None and not whole:
            given = {section: saved.whole(section) for section in saved}
            if apart:
                now = group_state.merged(coordination, pair, team.served)
            else:
                now = self.save(pair, dict)
            saved = Saved.of({**now, **given}, saved.strict)  # the servers keep theirs
        with ours():
            self.inner.load(pair, saved, load)
        if apart:
            index = team.service.group_of(team.job.task)
            group_state.loaded(coordination, pair, team.served, saved, whole, index)
        with ours():
            coordination.give()
            team.served.state.clear()


class ServedStep(Step):
    """What a task does under `ParameterServerStrategy`: a step is a push, and a pull before it.

    Args:
        team: The workers.
        parts: What their steps are made of.
        flush_denormals: As under `spartito.strategies.Strategy`.
    """

    team: ServedTeam

    def __init__(self, team: ServedTeam, parts: Parts, *, flush_denormals: bool = True) -> None:
        super().__init__(team, parts, sync_batchnorm=False, flush_denormals=flush_denormals)
        self._service, self._rules = team.service, team.service.rules
        self._loss: LossFunction | None = None
        self._deterministic = self._planned = False
        self._end_watch: Callable[[], None] = lambda: None
        atexit.register(self.close)

    @property
    def coordination(self) -> LeasedCoordination:
        """What the tasks agree on beside the computation."""
        return self.team.coordination

    @property
    def device(self) -> torch.device:
        """Where this task computes."""
        return self.team.device

    @property
    def in_groups(self) -> bool:
        """Whether a group has several workers."""
        return self._service.in_groups

    @flushed  # a ps serves in it: its threads inherit that
    def prepare(
        self, model: nn.Module, optimizer: OptimizerLike, settings: Settings
    ) -> tuple[nn.Module, Optimizer]:
        """As `Step.prepare`; a ps serves here until the job ends, and then exits with 0."""
        if self.team.pairs.all:
            raise UserError(
                "a second model under parameter_server",
                "It serves one model with one optimizer; a synchronous strategy takes several.",
            )
        if PRECISIONS.get(settings.precision) == "fp16":
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
        self._deterministic = settings.deterministic
        if settings.deterministic:
            self._rules.check_deterministic(has_batchnorm(model))
        self.team.enter_group()
        self._sync_batchnorm = self.team.member[1] > 1
        if self.is_chief:
            tell_of_statistics(self._rules, model)
        if settings.clip_norm is not None and means:
            self._rules = self._rules.clipping_means(settings.clip_norm, self._rules.spans)
            settings = dataclasses.replace(settings, clip_norm=None)
        found = super().prepare(model, optimizer, settings)
        if settings.deterministic and self._rules.spans > 1 and not self._rules.every:
            check_by_parameter(found[1], "parameter server")
        # Its steps are made on the servers: torch need not warn of schedules before the first.
        found[1]._opt_called = True  # type: ignore[attr-defined]
        self._join(self.team.pairs.only)
        return found

    def _after_steps(self, gradients: Gradients) -> optimizer_step.Asked | None:
        served = self._service.apart is None
        return divided_state.refuse_of_servers if served else divided_state.refuse_of_group

    def distribute(
        self, dataset: Any, *, seed: int | None = None, training: bool = True
    ) -> Distributed:
        chain = as_dataset(dataset)
        order = self._seed if seed is None else seed
        if training and self.coordination.pusher is not None:
            return Leased(self, self._divisible(chain, self._rules.workers), order)
        placing = Placing(self.team.device)
        batches = Loader(chain, (0, 1), order, placing)
        alone = IdentityCollective()  # the chief evaluates by itself
        return Placed(batches, placing, self.enter, alone, self.denormals)

    def step(self, batch: Batch, loss: LossFunction | None, *, stop: bool = False) -> StepResult:
        if self.team.inside.several:
            self.coordination.computing.stops |= stop  # the others hear of it in the update
        else:
            self.coordination.agree_to_stop(stop)
        self.coordination.announce_options()
        self.coordination.computing.repeats, self._loss = True, loss
        pair = self.team.pairs.only
        with self.parts.exchange.stepping(pair):
            output = self._compute(pair, batch, loss)
            if not self._is_due(pair):
                return StepResult(output, batch.global_size)
            return self._push(output)

    def flush(self) -> StepResult | None:
        return self.coordination.progress()  # all is pushed: what others did comes in

    def backward(self, losses: Any, batch: Batch) -> None:
        pair = self.team.pairs.only
        self.coordination.computing.repeats = False
        self.coordination.watch(True)
        if pair.accumulate > 1:
            if self.team.several:
                check_unchanged(pair)
            pair.gradients.backward_calls = 0  # the batches of one update are one mean
        else:
            self._check_backward(pair, batch)
        super().backward(losses, batch)
        pair.passes += 1

    @flushed
    def update(self, optimizer: Optimizer) -> None:
        pair = self.team.pairs.of(optimizer)
        self._check_computed(pair)
        if self._is_due(pair):
            self.coordination.announce_options()
            self._push(None)

    def save(self, directory: Path, later: bool = False) -> Unwritten:
        """As `Step.save`: the chief does, from the servers."""
        if self.is_chief or self.team.job.is_evaluator:
            return super().save(directory, later)
        pair = self.team.pairs.meant("save()")
        with self.parts.showing():
            self.parts.placement.save(pair, lambda: self.parts.exchange.save(pair, dict))
        return Unwritten(lambda: None, lambda: 0)

    @property
    def _tasks(self) -> Tasks:
        """Those who have the state between them, if it is of members of a group."""
        alone = IdentityCollective()
        attempt = self.coordination.attempt_in_group
        return Tasks(attempt, self.coordination.members or alone, self.is_chief)

    def close(self) -> None:
        """Leave the job; the chief ends it once the workers have left."""
        self._let_go()
        self._end_watch()
        self.coordination.failed(uncaught())
        atexit.unregister(self.close)
        self.coordination.leave()

    # What the leases ask for

    def follow(self) -> None:
        """Before an epoch: norms that came into the model are those of all members of a group.

        Raises:
            UserError: The training is deterministic, and workers that never meet have such norms.
        """
        if self._deterministic:
            self._rules.check_deterministic(has_batchnorm(self.team.pairs.only.model))
        self._follow()

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
            check_length(every, steps or chain.steps_per_epoch, self.team.pairs.only.accumulate)
        self._planned = True
        return Plan(
            data_shards=self._rules.workers,
            steps_per_pass=chain.steps_per_pass,
            passes_per_epoch=chain.repeats,
            epoch_steps=steps,
            epochs=count,
            gated=self._rules.in_step or (self._rules.max_staleness is not None and not every),
            together=self._rules.together,
            multiple=self.team.pairs.only.accumulate * max(1, every),
            accumulate=self.team.pairs.only.accumulate,
            fixed_length=self._deterministic or every > 0,
        )

    # Inside: one step

    def _is_due(self, pair: Pair) -> bool:
        """Whether the batches so far make a push."""
        current = self.coordination.computing.current
        is_last = current is not None and current.is_last
        return pair.passes >= pair.accumulate or is_last

    def _check_backward(self, pair: Pair, batch: Batch) -> None:
        """Refuse to weigh several backward passes of an update, of which nobody else knows."""
        pusher = self.coordination.computing
        if pusher.computed is not batch:
            pusher.check_updated()
        pusher.computed = batch
        if self.team.inside.several and pair.gradients.backward_calls:
            raise UserError(
                "several backward passes of an update in groups of several workers over servers",
                "Make one of each batch, or give each group one worker.",
            )

    def _push(self, output: Any) -> StepResult:
        """Push the gradients that wait; how far the training is then."""
        if self._service.apart is None and has_hooks(self.team.pairs.only.optimizer):
            raise UserError(
                "an optimizer with hooks on its step under parameter_server",
                "The servers update the parameters, and know of no hook: leave it out, or take a "
                "synchronous strategy.",
            )
        loss, weight = self.coordination.computing.push()
        if self.team.inside.several and self.coordination.computing.stops:
            self.coordination.agree_to_stop(True)
        return self.coordination.progress(output, loss, weight)

    def again(self, batch: Batch) -> Any:
        """Compute the gradients of a batch once more: the first ones came too late."""
        with listening(None):  # it has reported its figures
            return self._compute(self.team.pairs.only, batch, self._loss)

    def reduce_in_group(self, pair: Pair, brought: tuple[float, ...]) -> Reduced:
        """As `GroupStep.reduce_in_group`."""
        team, gradients = self.team, pair.gradients
        self.computation.complete(pair)
        gradients.whole = divided = team.model.world_size > 1
        with team.replicas.current_call.during("update"):
            weight, loss, (stops, *rest) = reduced(gradients, brought)
            if divided:
                stops = self._end_together(pair, stops, loss)
                pair.losses.check()
        gradients.summed = True
        weight, loss, is_finite = float(weight), float(loss), True
        if weight:
            norm = self.global_norm(pair)
            is_finite = isfinite(norm)
            if is_finite and pair.clip_norm is not None:
                gradients.clip(pair.clip_norm, norm)
        return Reduced(weight, loss, is_finite, stops > 0, rest)

    def update_in_group(self, pair: Pair) -> None:
        """As `GroupStep.update_in_group`."""
        self.parts.exchange.optimize(pair)

    def _compute(self, pair: Pair, batch: Batch, loss: LossFunction | None) -> Any:
        pulled = self.coordination.computing.servers.pulled
        with _watching(self.team, pair), pulled.computing() if pulled else nullcontext():
            return super()._compute(pair, batch, loss)

    def _join(self, pair: Pair) -> None:
        """Join the job: a ps serves, all others return with connections."""
        team, apart = self.team, self._service.apart
        served = pair.optimizer if apart is None else apart.optimizer(pair.optimizer)
        team.served = served
        if team.job.is_evaluator:
            return
        coordination, inside, options = self.coordination, team.inside, self._service.options
        own = self._model_of_group(pair)
        model, speakers = unwrap(pair.model), self._service.speakers
        with self.parts.showing():
            job = Job(self.cluster, self._rules, options, model, served, speakers, own.wholes)
        if self.task.type == "ps":
            serve_and_end(job, coordination.record_to)
        with during(CONNECT):
            chief = job.begin() if self.is_chief else None
            grouped = self.in_groups and team.group is not None
            work, servers = joined(job, chief, inside, own, team.groups.data if grouped else None)
            pusher: Pusher
            if apart is None:
                pusher = Pusher(pair, servers, self._rules, self.again)
            else:
                member = Member(pair, inside, own, team.replicas, self)
                pusher = GroupPusher(
                    member, servers, self._rules, work, apart.weights, coordination
                )
            coordination.join(job, chief, work, pusher, inside, team.member)
            if apart is None:
                self._end_watch = watch_state(pair.optimizer)
            coordination.given = PulledValues(servers.vector, str(self.task))
            # A group that trains apart has values of its own, and others bring them to its members.
            if work is None or (apart is None and not grouped):
                servers.pulled = coordination.given
            coordination.noted()
            if chief is not None:
                chief.gather(min(START_SECONDS, options.timeout))

    def _model_of_group(self, pair: Pair) -> GroupModel:
        """What one's own group has of the model."""
        inside = self.team.inside
        if not (inside.several and self._is_divided(pair)):
            return EqualModels(pair, inside.group)
        self.coordination.members = inside.group
        everybody = Placement((tuple(range(inside.group.world_size)),))
        alone = JoinedGroups(
            inside.group.rank, inside.group.names, everybody, inside.group, IdentityCollective, None
        )
        exchange = self.parts.exchange
        assert isinstance(exchange, Push), "made so"
        held = dataclasses.replace(self.parts, exchange=exchange.inner)
        values = self.values(pair, alone)
        return ModelInParts(pair, held, values, inside.group, self.coordination.attempt_in_group)


@contextmanager
def _watching(team: ServedTeam, pair: Pair) -> Generator[None]:
    """A block around a forward pass, which changes no buffer where numbers are one device's.

    Args:
        team: Who compute parts of a batch.
        pair: A prepared one.

    Raises:
        UserError: It does.
    """
    if pair.randomness is None or not team.divides:
        yield
        return
    with watched(unwrap(pair.model)) as changed:
        yield
    if changed:
        raise UserError(
            f"deterministic training under parameter_server with {in_words(changed)}, which the "
            "forward pass changes",
            "Workers see their own rows and do not meet there: leave deterministic out, or "
            "compute from all rows (strategy.reduce) under mirrored.",
        )
