"""The step: what one task does of a training, whatever its parts are."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from math import isfinite
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import torch
from msgspec import structs
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito import heartbeat
from spartito.accelerators import kind_of, wide
from spartito.checkpoint.saved_state import Saved
from spartito.checkpoint.saving import CopyMemory, Tasks, Unwritten, gather_together, save_together
from spartito.checkpoint.write_plan import Local
from spartito.cluster.spec import NO_RANK, ClusterSpec, Task
from spartito.collectives.collective import Collective, IdentityCollective
from spartito.collectives.process_group import works_there
from spartito.data.batch import Batch
from spartito.data.dataset import Dataset, as_dataset
from spartito.data.reading.loader import Loader, check_divides
from spartito.data.reading.placing import Placing
from spartito.data.source import PerWorker
from spartito.engine import loop_metrics
from spartito.engine.devices.denormals import Denormals, flushed
from spartito.engine.devices.device import divide_cores, move
from spartito.engine.devices.host_reads import Number, read
from spartito.engine.devices.memory_check import check_memory
from spartito.engine.devices.precision import choose_precision, convert, make_loss_scale
from spartito.engine.drift import DriftedError
from spartito.engine.gradients.gradient_sum import Gradients, reduced
from spartito.engine.losses.loss import LossFunction, weigh
from spartito.engine.meta.meta_models import is_unmade, making, plan_values
from spartito.engine.modules.batchnorm import (
    asks_for_synchronization,
    batchnorms,
    is_synchronized,
    local_norms,
    separate_batchnorm,
    synchronize_batchnorm,
)
from spartito.engine.modules.trial_passes import meets_nobody
from spartito.engine.randomness.global_randomness import globalize
from spartito.engine.sharding.hidden_parameters import asleep, check_shown
from spartito.engine.step_context import (
    UNKNOWN,
    StepContext,
    belong,
    enter,
    enter_none,
    leave,
)
from spartito.engine.updates import divided_state
from spartito.engine.updates.divided_update import DividedUpdates
from spartito.engine.updates.optimizer_step import (
    Asked,
    ask_before_steps,
    stepped_apart,
    stop_asking,
)
from spartito.engine.updates.optimizers import (
    NoOptimizer,
    OptimizerLike,
    check_computes_once,
    check_initialized,
    check_lookups,
    check_members,
    check_no_script,
    check_optimizer,
    check_undivided,
    fuse,
    has_part,
    is_compiled,
    load_named_state,
    make_optimizer,
    named_state,
    optimizer_parameters,
    skipping,
    unwrap,
)
from spartito.errors import SpartitoError, UserError
from spartito.mesh.placing import hidden
from spartito.names import nearest
from spartito.notes import note, warn
from spartito.outer.group_values import Replicas, Values
from spartito.outer.joined_groups import JoinedGroups
from spartito.steps.batches import Placed, Together
from spartito.steps.coordination import Coordination
from spartito.steps.distributed import Distributed, StepResult
from spartito.steps.groups import Groups
from spartito.steps.loop_batches import LoopState
from spartito.steps.parts import Parts, Settings, State
from spartito.steps.placements.computation import Evaluated, WholeModel, are_spare, no_gradient
from spartito.steps.prepared import Pair, check_taken, check_unchanged, take, tensors_of
from spartito.steps.state_parts import (
    load_model,
    names_of_all,
    parameters_here,
    saved_gradients,
    saved_optimizer,
    take_apart,
)
from spartito.steps.task_end import uncaught
from spartito.steps.team import Team


class Step:
    """What one task does of the steps of a strategy.

    Args:
        team: The tasks that make them.
        parts: What they are made of.
        sync_batchnorm: As under `spartito.strategies.Strategy`.
        flush_denormals: Likewise.
    """

    def __init__(
        self,
        team: Team,
        parts: Parts,
        *,
        sync_batchnorm: bool | None = None,
        flush_denormals: bool = True,
    ) -> None:
        self.team, self.parts = team, parts
        self.computation, self.recovery = parts.placement.computation, parts.recovery
        self.denormals = Denormals(flush_denormals)
        self._sync_batchnorm = sync_batchnorm
        self._seed = 0
        self._entered: Batch | None = None
        self._context: StepContext | None = None
        heartbeat.begin()
        divide_cores(team.cluster)
        team.form(parts)
        self._leave = weakref.finalize(self, _leave, team.closing, team.groups, team.pairs.state)

    # Who is there

    @property
    def cluster(self) -> ClusterSpec:
        """The tasks that train at present."""
        return self.team.cluster

    @property
    def task(self) -> Task:
        """As `Strategy.task`."""
        return self.team.job.task

    @property
    def is_chief(self) -> bool:
        """As `Strategy.is_chief`."""
        return self.team.is_chief

    @property
    def groups(self) -> Groups:
        """The groups that this task is in: "world", "data" and "model"."""
        return self.team.groups

    @property
    def coordination(self) -> Coordination:
        """What the tasks agree on beside the computation."""
        return self.team.coordination

    @property
    def data_shard(self) -> tuple[int, int]:
        """As `Strategy.data_shard`."""
        return self.team.data_shard

    @property
    def num_replicas_in_sync(self) -> int:
        """As `Strategy.num_replicas_in_sync`."""
        return self.data_shard[1]

    @property
    def num_replicas(self) -> int:
        """As `Strategy.num_replicas`."""
        return self.team.num_replicas

    # Preparation

    @flushed
    def prepare(
        self, model: nn.Module, optimizer: OptimizerLike, settings: Settings
    ) -> tuple[nn.Module, Optimizer]:
        """As `Strategy.prepare`."""
        team, placement = self.team, self.parts.placement
        precision = choose_precision(settings.precision, team.device, team.job.task.type != "ps")
        settings = replace(settings, precision=precision)
        settings.check()
        self.parts.exchange.check(optimizer, settings)
        if team.cluster.world_size > 1 or team.cluster.addresses.get("ps"):
            check_initialized(model)
        check_no_script(model, settings.deterministic)
        check_undivided(model)
        check_shown(model, team.pairs.has)
        divided_state.check_state(optimizer)
        if team.own_shard[1] > 1 or team.cluster.addresses.get("ps"):
            check_lookups(model)
        placement.check(model, settings)
        team.outer.check(model, precision, team)
        with asleep():
            if is_unmade(model):
                plan_values(unwrap(model), precision)
                with making(unwrap(model)):
                    placement.lay_out(unwrap(model))
            if team.device.type != "cpu" or not is_unmade(model):
                move(model, team.device, optimizer)
            convert(model, precision)
            made = make_optimizer(optimizer, model)
            check_optimizer(made, model, team.cluster.world_size)
            fuse(made, model)
            if team.device.type == "cpu" and team.cluster.rank != NO_RANK:
                fraction = placement.fraction * self.parts.exchange.fraction
                check_memory(optimizer_parameters(made), made, fraction)
            synchronized = self._sync_batchnorm
            if synchronized is None:
                synchronized = settings.deterministic or asks_for_synchronization(model)
            change = synchronize_batchnorm if synchronized else separate_batchnorm
            change(model)
            randomness = globalize(model) if settings.deterministic else None
            if randomness is not None and is_compiled(model) and team.is_chief:
                note(
                    "torch.compile does nothing with deterministic=True: what the model draws is "
                    "looked for among its operations, as they are called"
                )
            self._seed = settings.seed
            tensors = tensors_of(model)
            team.meet()
            placement.bring(model, list(tensors.values()))
            team.watch_clipping(self.parts.exchange.divides)
            whole, gradients = placement.gradients(model, made)
            dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
            dtype = dtypes.pop() if len(dtypes) == 1 else None
            pair = Pair(
                whole, made, gradients, settings.accumulate, settings.clip_norm, precision, dtype,
                tensors, settings.seed, randomness, make_loss_scale(precision, team.device),
                synchronized,
            )  # fmt: skip
        team.pairs.add(pair)
        team.pairs.state.in_groups = team.is_chief and not team.outer.is_whole
        belong(whole, weakref.WeakMethod(self._present), again=True)
        ask_before_steps(made, self._step_by_hand, self._after_steps(gradients))
        of_model = team.model.world_size > 1 and has_part(unwrap(whole))
        if of_model or self._after_steps(gradients) is divided_state.refuse:
            divided_state.watch_state(made, team.called)
        else:
            divided_state.forget_state(made)
        step = weakref.proxy(self)  # who lets go of a strategy leaves its groups
        pair.edits.largest = weakref.WeakMethod(self._largest)
        loop_metrics.forget(self._data)
        loop_metrics.watch(self._data)
        placement.prepared(pair, lambda pair: step._couple(pair))
        return whole, made

    def _after_steps(self, gradients: Gradients) -> Asked | None:
        """Who is asked before the steps of an optimizer once this strategy is closed."""
        if isinstance(gradients, DividedUpdates) or 0 < self.parts.exchange.fraction < 1:
            return divided_state.refuse
        return None if self.team.outer.is_whole else divided_state.refuse_of_group

    def _data(self) -> Collective:
        """The group of those who have other examples of a batch."""
        return self.groups.data

    def _largest(self, value: Tensor) -> Tensor:
        """The largest of a value on all tasks that update together.

        Raises:
            UserError: Others update apart, who would not hear of it.
        """
        if not self.team.outer.is_whole:
            raise UserError(
                f"a GradScaler under {self.team.called}, whose groups would leave out different "
                "updates",
                "Use prepare(..., precision='fp16'), which scales the loss itself.",
            )
        for group in (self.team.model, self.team.replicas):
            value = torch.stack(group.all_gather(value)).amax(0)
        return value

    def _couple(self, pair: Pair) -> None:
        """Couple what this task has of a pair with what other groups have of it."""
        step = weakref.proxy(self)
        self.team.outer.add(pair, self.team, lambda *given: step.values(*given))

    def _welcome(self, pair: Pair) -> None:
        """Take in what was put into the model after it was prepared."""
        model = unwrap(pair.model)
        check_members(pair.optimizer, model)
        fuse(pair.optimizer, model)
        if pair.synchronized:
            synchronize_batchnorm(model)
        known, pair.shared = pair.shared, tensors_of(model)
        new = [tensor for key, tensor in pair.shared.items() if key not in known]
        self.parts.placement.bring(model, new)

    def _follow(self) -> None:
        """Before an epoch: norms become those of the pairs in use.

        Norms without parameters may have come into a model, and another pair may have it too. What
        an optimizer has is to be in it still.
        """
        in_use = self.team.pairs.in_use
        for pair in in_use:
            model = unwrap(pair.model)
            check_undivided(model, pair.optimizer)
            check_members(pair.optimizer, model)
            if not pair.synchronized and is_synchronized(model):
                with hidden(model):
                    separate_batchnorm(model)
        for pair in in_use:
            model = unwrap(pair.model)
            if pair.synchronized and local_norms(model):
                with hidden(model):
                    synchronize_batchnorm(model)
                self._welcome(pair)

    def using(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """As `Strategy.using`."""
        return self.team.pairs.using(optimizer)

    # Batches

    def distribute(
        self, dataset: Any, *, seed: int | None = None, training: bool = True
    ) -> Distributed:
        """As `Strategy.distribute`."""
        loop_metrics.install()
        team = self.team
        shard, order = team.data_shard, self._seed if seed is None else seed
        chain: Dataset = as_dataset(dataset)
        chain = self._divisible(chain, shard[1]) if training else chain
        if training:
            check_divides(chain, shard[1])
            chain = team.outer.divided(chain, team.pairs.in_use)
            for each in team.pairs.in_use:
                if each.randomness is not None:
                    each.randomness.measure_again()
        placing = Placing(team.device)
        loader, group = Loader(chain, shard, order, placing), team.groups.data
        uneven = isinstance(chain.source, PerWorker) and shard[1] > 1
        batches = Together(loader, group) if uneven else loader
        pair = team.pairs.used or next(iter(team.pairs.all), None)
        if pair is not None and training and chain.steps_per_epoch is not None:
            team.outer.tell_length(-(-chain.steps_per_epoch // pair.accumulate))
        found = Placed(
            batches, placing, self.enter, group, self.denormals,
            team.pairs if training else None, self.parts.placement.account.counted,
            self._follow if training else None,
        )  # fmt: skip
        found.length = chain.steps_per_epoch
        return team.outer.placed(found, training)

    def _divisible(self, chain: Dataset, parts: int) -> Dataset:
        """``chain`` whose batches are cut into ``parts`` so that every BatchNorm can use them."""
        in_use = self.team.pairs.in_use
        apart = (pair.model for pair in in_use if not pair.synchronized)
        if parts == 1 or not any(map(batchnorms, apart)):
            return chain
        size = chain.batch_size
        if size is not None and size < 2 * parts and self.is_chief:
            warn(
                "a batch of %d rows leaves %d of %d replicas without any: BatchNorm needs two; "
                "take a larger batch, or sync_batchnorm=True",
                size, parts - size // 2, parts,
            )  # fmt: skip
        return replace(chain, least=2)

    def enter(self, batch: Batch) -> None:
        """Tell the modules that look beyond their replica which batch comes next.

        All replicas call it before a batch: parameters that are new since the last one get the
        chief's values. `distribute` does so for the batches that it gives.

        Args:
            batch: The batch that is computed next.
        """
        pairs = self.team.pairs
        in_use = pairs.in_use
        self.computation.enter(in_use)
        self._entered = batch
        for pair in in_use:
            if pair.new:
                self._welcome(pair)
        looks_beyond = False
        for pair in in_use:
            pair.gradients.before_forward(pair.passes + 1 >= pair.accumulate, batch.epoch)
            looks_beyond = looks_beyond or pair.looks_beyond
            if pair.randomness is not None and isinstance(self.computation, WholeModel):
                pair.randomness.watch_rows(unwrap(pair.model))
        if looks_beyond:
            seed = self._seed if pairs.used is None else pairs.used.seed
            step = batch.epoch << 32 | batch.step
            unknown = self.team.data_shard[1] > 1 and batch.left_out
            offsets = torch.full_like(batch.offsets, UNKNOWN) if unknown else batch.offsets
            self._context = StepContext(
                self.team.replicas, seed, step, batch.global_size, offsets,
                keep_apart=weakref.WeakMethod(self._keep_apart),
            )  # fmt: skip
            enter(self._context)
        else:
            self._context = None
            enter_none(self.team.replicas)  # that of a pair that was in use before

    def _present(self) -> StepContext | None:
        """What forward passes of our models belong to, if these replicas are still the same."""
        context = self._context
        return context if context and context.collective is self.team.replicas else None

    def _keep_apart(self) -> None:
        """Batches of another strategy come between ours: a model belongs to its own."""
        for pair in self.team.pairs.all:
            if pair.looks_beyond:
                belong(pair.model, weakref.WeakMethod(self._present))

    def _come_back(self) -> None:
        """Go on with our batch: others may have been taken from another strategy meanwhile."""
        if (context := self._present()) is not None:
            enter(context)

    # A step

    def step(self, batch: Batch, loss: LossFunction | None, *, stop: bool = False) -> StepResult:
        """As `Strategy.step`."""
        team = self.team
        team.outer.begin()
        with team.outer.telling(), team.replicas.current_call.during("step"):
            pair = team.pairs.only
            if pair.skips_nonfinite and not pair.passes:
                pair.keep_buffers()
            pair.loss = loss if isinstance(loss, nn.Module) else None
            with self.parts.exchange.stepping(pair):
                output = self._compute(pair, batch, loss)
                if pair.passes < pair.accumulate:
                    return StepResult(output, batch.global_size)
                return self._update(pair, output, batch.global_size, stop)

    def flush(self) -> StepResult | None:
        """As `Strategy.flush`."""
        team, found = self.team, None
        team.outer.begin()
        with team.outer.telling():
            pair = team.pairs.meant("flush()")
            if pair.passes:
                found = structs.replace(self._update(pair, None, 0, False), batches=0)
            team.outer.flush(pair)
        return found

    def _compute(self, pair: Pair, batch: Batch, loss: LossFunction | None) -> Any:
        """The output for a batch, whose gradients wait with those before."""
        self.recovery.begin(pair, batch)
        self.team.pairs.batches.saw(batch)
        if self._entered is not batch:
            self.enter(batch)
        self._come_back()
        self._entered = None  # computed again, it is entered again
        output = self.computation.train(pair, batch, loss)
        pair.passes += 1
        self.recovery.saw(output, batch)
        return output

    def evaluate(self, batch: Batch, loss: LossFunction | None) -> Evaluated:
        """As `Strategy.evaluate`."""
        return self.computation.evaluate(self.team.pairs.meant("evaluate()"), batch, loss)

    def predict(self, batch: Batch, has_loss: bool) -> Any:
        """As `Strategy.predict`."""
        return self.computation.predict(self.team.pairs.meant("predict()"), batch, has_loss)

    # An update

    def _update(self, pair: Pair, output: Any, examples: int, stop: bool) -> StepResult:
        """Make one update of the gradients that wait, and clear them."""
        update = partial(self._update_group, pair, output, examples, stop)
        return self.team.outer.update(pair, update)

    def _update_group(self, pair: Pair, output: Any, examples: int, stop: bool) -> StepResult:
        """Make an update of one's own group."""
        team, recovery, randomness = self.team, self.recovery, pair.randomness
        self.computation.complete(pair)
        drawn = () if randomness is None else randomness.piggybacked()
        scaled = pair.precision == "fp16"  # torch's scaler is what skips steps then
        divided = team.model.world_size > 1
        pair.gradients.whole = scaled or divided
        with team.replicas.current_call.during("update"):
            brought = (float(stop), *drawn, *recovery.brings())
            weight, loss, (stops, *rest) = reduced(pair.gradients, brought)
            if divided:  # of one model: they end together too
                stops = self._end_together(pair, stops, loss)
        pair.gradients.summed = True
        if randomness is not None:
            randomness.check(rest[:2])
        dropped = False
        with skipping(pair.optimizer, float(weight) if scaled else weight) as is_due:
            if is_due:
                pair.loss_scale.unscale(pair.optimizer, team.model)
                dropped = self._is_dropped(pair, loss)
                if not dropped:
                    with recovery.updating(pair):
                        self.parts.exchange.optimize(pair)
        pair.forget()
        if dropped:
            pair.restore_buffers()
            loss = weight = 0.0
        recovery.brought(pair, rest[len(drawn) :])
        if not pair.is_compared:
            pair.is_compared = True
            if team.recovery is None:  # else some may be here later
                team.coordination.compare_order(team.pairs.batches.drawn)
                if randomness is not None:
                    team.coordination.compare_buffers()
        return StepResult(
            output,
            examples,
            updates=1,
            loss=loss,
            weight=weight,
            stop=stops > 0,
            dropped=int(dropped),
            norm=pair.norm if pair.reports_norm and not dropped else None,
        )

    def _is_dropped(self, pair: Pair, loss: Number) -> bool:
        """Clip the gradients; whether they are of no use. In fp16 the scaler finds that out."""
        skips = pair.skips_nonfinite and pair.precision != "fp16"
        if pair.clip_norm is None and not skips and not pair.reports_norm:
            return False
        pair.norm = norm = self.global_norm(pair)
        if skips and not all(map(isfinite, read([norm, loss]))):
            return True
        if pair.clip_norm is not None:
            pair.gradients.clip(pair.clip_norm, norm)
        return False

    def _end_together(self, pair: Pair, stops: float, loss: Number) -> float:
        """How many tasks of one model have asked for an end; their losses have to be equal.

        Where a device has these, they are looked at where replicas are compared.
        """
        there = works_there(self.team.model)
        own = [stops] if there else [stops, float(loss)]
        found = torch.stack(self.team.model.all_gather(torch.tensor(own, dtype=torch.float64)))
        losses = there.gather_there((loss,))[:, 0] if there else found[:, 1]
        pair.losses.look(losses)
        if there is None:
            pair.losses.check()
        return found[:, 0].sum().item()

    def global_norm(self, pair: Pair) -> Tensor:
        """The L2 norm of an update's gradients, those of other tasks' parameters included.

        Args:
            pair: The prepared pair, whose gradients are reduced.

        Returns:
            A scalar; where every task has all of the model its own gradients tell.
        """
        model = self.team.model
        if model.world_size == 1:
            return pair.gradients.norm()
        found = list(pair.gradients.own_gradients())
        of_here = [parameter for parameter, _ in found]
        fractions = self.parts.placement.fractions(pair, of_here)
        of_fraction: dict[float, list[Tensor]] = {}
        for (_, grad), fraction in zip(found, fractions, strict=True):
            if fraction:
                of_fraction.setdefault(fraction, []).append(grad)
        device = self.team.device
        total = torch.zeros(1, dtype=kind_of(device).exact, device=device)
        for fraction, grads in of_fraction.items():
            total += wide(torch.nn.utils.get_total_norm(grads)).square() * fraction
        return model.all_reduce(pair.gradients.sum(total)).sqrt()[0]

    def values(self, pair: Pair, column: JoinedGroups) -> Values:
        """What this task has of a pair's parameters, for groups that merge them.

        Args:
            pair: A prepared one.
            column: Those who have the same, by their groups.
        """
        parts = self.parts
        whole = partial(
            Replicas, pair.model, column, self.team.groups.model,
            partial(parts.cuts, pair, "model"), partial(parts.placement.fractions, pair),
        )  # fmt: skip
        return parts.exchange.values(pair, column, whole)

    # Loops of the user's own

    @flushed
    def backward(self, losses: Any, batch: Batch) -> None:
        """As `Strategy.backward`."""
        computation, team = self.computation.by_hand("backward"), self.team
        self._come_back()
        found = weigh(losses, batch)
        if not found.value.requires_grad:
            raise no_gradient()
        if not team.pairs.all:
            team.pairs.meant("backward()")  # says what comes first
        team.pairs.batches.saw(batch)
        drawn = any(pair.has_drawn for pair in team.pairs.all)
        newest = team.pairs.all[-1]  # who prepares another model begins another training
        found = computation.looked_at(newest, None, None, batch, found, drawn)
        sums = team.several
        for pair in team.pairs.all if sums else ():
            check_unchanged(pair)
        again = [pair for pair in team.pairs.all if pair.gradients.backward_calls]
        divisor = 0.0
        if again:  # what waits becomes the mean of its own batch, and this one joins it as such
            weights = [found.weight, *(pair.gradients.weight for pair in again)]
            weighed = torch.tensor([float(weight) for weight in weights]).double()
            with team.replicas.current_call.during("reduce"):  # with those that update together
                total, *before = team.replicas.all_reduce(weighed).tolist()
            divisor = total or 1.0
            scaled = set[int]()  # a parameter of several optimizers waits with the least of them
            for weight, pair in sorted(zip(before, again, strict=True), key=itemgetter(0)):
                pair.gradients.normalize(weight, scaled)
        for pair in team.pairs.all:
            pair.gradients.backward_calls += 1
            pair.taken = 0
        computation.backward(team.pairs.all, found, batch, divisor)
        scaled = set[int]()
        for pair in team.pairs.all:
            if again:
                pair.gradients.normalize(0.0)
            elif not sums and pair.accumulate == 1:  # `.grad` is what it is in plain torch
                pair.gradients.normalize(pair.gradients.weight, scaled)
            if sums:
                pair.edits.note(pair.gradients.parameters)

    def update(self, optimizer: Optimizer) -> None:
        """As `Strategy.update`."""
        self.computation.by_hand("update")
        with self.team.outer.telling():
            self._update_by_hand(optimizer)

    @flushed
    def _update_by_hand(self, optimizer: Optimizer) -> None:
        check_computes_once(optimizer)
        pair = self.team.pairs.of(optimizer)
        if pair.accumulate > 1:
            what = f"update() after prepare(accumulate={pair.accumulate})"
            raise UserError(what, "In a loop of your own, call it once per so many batches.")
        check_taken(pair)
        self._check_computed(pair)
        take(pair.gradients.parameters, self.team.pairs.sharing(optimizer))
        self._update(pair, None, 0, False)

    def _step_by_hand(self, optimizer: Optimizer, given: tuple[Any, ...]) -> bool:
        """``optimizer.step()`` in a loop of the user's own is an update; whether it was one.

        On one device it is the optimizer's own after ``loss.backward()``, as without a strategy.
        """
        pair, cluster = self.team.pairs.of(optimizer), self.cluster
        if not pair.gradients.backward_calls:
            if cluster.world_size == 1 and not cluster.addresses.get("ps"):
                return False
            raise stepped_apart(optimizer, cluster.num_computing)
        check_computes_once(optimizer)
        if any(each is not None for each in given):
            raise UserError(
                f"{type(optimizer).__name__}.step(closure) after strategy.backward()",
                "Call optimizer.step() or strategy.update(optimizer): the gradients are there.",
            )
        self.update(optimizer)
        return True

    def _check_computed(self, pair: Pair) -> None:
        """Refuse an update of gradients that no `backward` has computed as they are.

        Those whose weight nobody knows would change nothing.
        """
        gradients = pair.gradients
        if not gradients.backward_calls and any(p.grad is not None for p in gradients.parameters):
            raise UserError(
                "update() without strategy.backward(): it knows not how much these gradients weigh",
                "Write strategy.backward(loss, batch) in place of loss.backward().",
            )
        if self.team.several:
            check_unchanged(pair)

    def reduce(self, op: str, value: Tensor | float) -> Tensor:
        """As `Strategy.reduce`."""
        if not isinstance(value, Tensor):
            device = self.team.device
            value = torch.tensor(value, dtype=kind_of(device).exact, device=device)
        value, group = value.detach(), self.groups.data
        if meets_nobody():
            group = IdentityCollective()
        with self.coordination.during("reduce"):
            counts = not are_spare()
            if op == "sum":
                return group.all_reduce(value.clone() if counts else torch.zeros_like(value))
            if op == "mean":
                total = wide(value).sum()
                both = torch.stack([total, torch.full_like(total, value.numel())])
                if not counts:
                    both.zero_()
                group.all_reduce(both)
                return both[0].div(both[1]).to(torch.promote_types(value.dtype, torch.float32))
            if op in ("max", "min"):
                if not counts:
                    low, high = _ends(value.dtype)
                    value = torch.full_like(value, low if op == "max" else high)
                parts = torch.stack(group.all_gather(value))
                return parts.amax(0) if op == "max" else parts.amin(0)
        raise UserError(f"reduce({op!r})", nearest(op, ("sum", "mean", "max", "min")))

    def gather(self, rows: Tensor) -> Tensor:
        """As `Strategy.gather`."""
        if meets_nobody():
            return rows.detach()
        with self.coordination.during("gather"):
            # Nowhere with a gradient: that of others' losses does not come here.
            given = rows.detach()[:0] if are_spare() else rows.detach()
            return torch.cat(self.groups.data.all_gather_rows(given))

    def synchronize(self) -> None:
        """As `Strategy.synchronize`."""
        self.coordination.synchronize()

    # Checkpoints

    def save(self, directory: Path, later: bool = False) -> Unwritten:
        """As `Strategy.save`."""
        pair = self.team.pairs.meant("save()")
        with self.parts.showing():
            apart = partial(self._taken_apart, pair, self._state(pair))
            kept = self._kept_copies if later else None
            return save_together(Path(directory), apart, self._tasks, kept)

    def save_model(self, directory: Path) -> None:
        """As `save`, of the model alone: what it learns with is not written.

        Args:
            directory: It exists and is empty.
        """
        pair = self.team.pairs.meant("save_model()")
        with self.parts.showing():
            model = {"model": self._state(pair)["model"]}
            save_together(directory, partial(self._taken_apart, pair, model), self._tasks)

    def state_dict(self) -> State:
        """As `Strategy.state_dict`."""
        pair = self.team.pairs.meant("state_dict()")
        with self.parts.showing():
            state = self._state(pair)
            if not self._is_divided(pair):
                return state
            found = gather_together(partial(self._taken_apart, pair, state), self._tasks)
        if pair.order:
            found["model"] = {name: found["model"][name] for name in pair.order}
        return found

    def load(self, source: str | Path | Saved | Mapping[str, Any]) -> None:
        """As `Strategy.load`; also of a state that is read part by part."""
        self.team.pairs.meant("load()")
        if isinstance(source, str | Path):
            source = Saved.at(Path(source))
        if isinstance(source, Saved):
            self._load(source)
            return
        if "model" not in source:
            raise UserError(
                f"a state with {', '.join(map(repr, [*source][:3])) or 'nothing'}, and no 'model'",
                'Give what state_dict() returned, or {"model": model.state_dict()}.',
            )
        self._load(Saved.of(source))

    def keep(self) -> Callable[[], None]:
        """As `Strategy.keep`."""
        team = self.team
        pair = team.pairs.meant("keep()")
        if team.outer.name:
            self.synchronize()  # what all groups have together
        if team.model.world_size > 1:
            return self._keep_parts(pair)
        state = unwrap(pair.model).state_dict().items()
        kept = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in state}
        return partial(self.load, {"model": kept})

    def _keep_parts(self, pair: Pair) -> Callable[[], None]:
        """As `keep`, of what this task has of a model that lies on several."""

        def copies() -> State:
            model = unwrap(pair.model)
            tensors = [*model.parameters(), *model.buffers()]
            return {"here": [(tensor, tensor.detach().clone()) for tensor in tensors]}

        kept = self.parts.placement.save(pair, copies)["here"]

        @torch.no_grad()
        def put_back() -> None:
            for tensor, value in kept:
                tensor.copy_(value)
            pair.gradients.compared()
            here = partial(self._optimizer_here, pair)
            self.team.outer.load(pair, Saved.of({"model": {}}), here)  # groups begin from there

        return put_back

    def _state(self, pair: Pair) -> State:
        """This task's own part of model and optimizer, under the user's names."""

        def state() -> State:
            self.coordination.compare(self.team.pairs.batches.order)
            self.synchronize()
            model = unwrap(pair.model)
            found: State = {
                "model": dict(model.state_dict()),
                "optimizer": named_state(model, pair.optimizer),
            }
            if scale := pair.loss_scale.state_dict():
                found["loss_scale"] = scale
            if pair.passes:
                found["accumulated"] = pair.accumulated()
            return self.team.outer.saved(pair, found, self.parts.cuts(pair, "optimizer"))

        return self.parts.placement.save(pair, lambda: self.parts.exchange.save(pair, state))

    def _load(self, saved: Saved) -> None:
        """Take back one's own part of what any strategy has saved."""
        parts, pair = self.parts, self.team.pairs.only

        def load(found: Saved) -> None:
            parts.exchange.load(pair, found, partial(self._take, pair))

        with self.recovery.loading(), self.parts.showing():
            parts.placement.load(pair, saved, load)

    def _take(self, pair: Pair, saved: Saved) -> None:
        """Read model and optimizer, and what each group alone has; all tasks call it."""
        attempt, model = self._tasks.attempt, unwrap(pair.model)
        all_ = names_of_all(model, attempt)

        def load() -> str:
            load_model(model, saved, self.parts.cuts(pair, "model"), all_)
            pair.gradients.compared()
            if "optimizer" in saved:  # all of a training: what waits is of another one
                self._take_training(pair, saved, all_)
            return ""

        attempt(load)
        self.team.outer.load(pair, saved, partial(self._optimizer_here, pair))

    def _take_training(self, pair: Pair, saved: Saved, all_: set[str]) -> None:
        """What is beside the model; ``all_`` are the names of all tasks."""
        model = unwrap(pair.model)
        own = parameters_here(model)
        pair.gradients.clear()
        pair.passes, pair.saved = 0, None
        if "accumulated" in saved:
            pair.saved = saved_gradients(saved, own, self.parts.cuts(pair, "accumulated"))
        if "loss_scale" in saved and (scale := saved.whole("loss_scale")):
            pair.loss_scale.load_state_dict(scale)
        if not isinstance(pair.optimizer, NoOptimizer):
            cuts, kept = self._optimizer_here(pair)
            load_named_state(model, pair.optimizer, saved_optimizer(saved, kept, all_, cuts))

    def _optimizer_here(self, pair: Pair) -> tuple[Mapping[str, Any], set[str]]:
        """Of which parameters the optimizer's state is here, and how it is cut."""
        kept = self.parts.owned(pair)
        if kept is None:
            kept = parameters_here(pair.model)
        return self.parts.cuts(pair, "optimizer"), kept

    def _taken_apart(self, pair: Pair, state: State) -> dict[str, Local]:
        return take_apart(state, partial(self.parts.cuts, pair))

    def _is_divided(self, pair: Pair) -> bool:
        """Whether tasks have parts of the state, or some of its tensors; equal on all of them."""
        divided = self.parts.owned(pair) is not None or self.team.model.world_size > 1
        return divided or self.team.outer.has(pair)

    @cached_property
    def _kept_copies(self) -> CopyMemory:
        return CopyMemory()

    @property
    def _tasks(self) -> Tasks:
        return Tasks(self.coordination.attempt, self.groups.world, self.is_chief)

    # The end

    def close(self) -> None:
        """As `Strategy.close`."""
        try:
            self._compare_at_end()
        finally:
            self._let_go()
            self._leave()

    def _let_go(self) -> None:
        """End what holds in this process while the strategy is in use, and nobody else's."""
        leave(self.team.replicas)
        self._context = None
        self.denormals.close()
        self.team.forget_clipping()
        loop_metrics.forget(self._data)
        for pair in self.team.pairs.all:
            pair.gradients.leave()
            pair.edits.largest = lambda: None
            stop_asking(pair.optimizer, self._step_by_hand)

    def _compare_at_end(self) -> None:
        """Compare the replicas after a loop of the user's own, in which nothing else does.

        Who does not come to this has no part in it: others may close long before.
        """
        pairs = self.team.pairs
        unseen, pairs.unseen = pairs.unseen, False
        if not unseen or self.cluster.world_size == 1 or sys.exc_info()[1] is not None:
            return
        try:
            with self.coordination.during("close"):
                self.coordination.compare(self.team.pairs.batches.order)
                if not self.team.outer.is_whole:
                    self.synchronize()  # what is done with the model later is done by all
        except DriftedError:
            raise
        except SpartitoError:
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _ends(dtype: torch.dtype) -> tuple[float, float]:
    """The least number of a type, and the largest."""
    if dtype == torch.bool:
        return False, True
    about = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return about.min, about.max


def _leave(closing: Sequence[Callable[[], object]], groups: Groups, state: LoopState) -> None:
    """Leave the groups: by `close`, with the strategy, or when the process ends.

    gloo aborts a process that ends with its group open. DDP goes first: else letting go of it would
    wait for the group's threads with the interpreter's lock, which one of them may want.
    """
    if state.in_groups and state.unseen and uncaught() is None:
        warn(
            "a strategy whose groups train apart ended without close(): what they have learned "
            "since they met last is each group's own. Call strategy.close() before the model is "
            "used, or write `with strategy:`"
        )
    for close in closing:
        close()
    groups.close()
