"""What one process does with its part of a step, whoever the others are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.cluster.spec import NO_RANK, ClusterSpec
from spartito.collectives.collective import Collective, IdentityCollective
from spartito.data.batch import Batch
from spartito.data.collate import count_rows, rows
from spartito.data.dataset import Dataset
from spartito.engine import clipping
from spartito.engine.backward import backward, first_gradient
from spartito.engine.batchnorm import (
    asks_for_synchronization,
    check_evaluation,
    keeping_statistics,
    local_batchnorms,
    synchronize_batchnorm,
)
from spartito.engine.context import StepContext, enter
from spartito.engine.denormals import flushed
from spartito.engine.devices import choose_device, divide_cores
from spartito.engine.gradients import Gradients
from spartito.engine.halves import doubt
from spartito.engine.loss import (
    LossFunction,
    WeightedLoss,
    evaluate_loss,
    forward,
    in_dtype,
    look,
    look_at_own,
    needs_all,
    weigh,
)
from spartito.engine.memory import check_memory
from spartito.engine.optimizers import (
    OptimizerLike,
    check_initialized,
    check_members,
    check_optimizer,
    check_undivided,
    check_whole,
    fuse,
    make_optimizer,
    optimizer_parameters,
    unwrap,
)
from spartito.engine.precision import autocast, choose_precision, convert, make_loss_scale
from spartito.engine.randomness import RandomnessForbidden, globalize, replaying
from spartito.engine.stepping import ask_before_steps, stepped_apart, stop_asking
from spartito.engine.unmade import is_unmade, make_all, making, plan_values
from spartito.errors import UserError
from spartito.log import warn
from spartito.steps.distributed import StepResult
from spartito.steps.outer import Outer
from spartito.steps.pair import Pair, check_taken, check_unchanged, take
from spartito.steps.saving import SavingStep


class ReplicaStep(SavingStep):
    """A model that lives whole in this process, and computes its part of the global batch.

    What is left to the kinds of it: how gradients become an update (`_update`), and who else
    is there. ``device`` None takes this process's own GPU, else the CPU. ``sync_batchnorm``
    makes BatchNorm one over the global batch; None does so when training is deterministic, and
    where the model has torch's SyncBatchNorm.
    """

    _takes_shards = False  # a model that was cut before

    def __init__(
        self,
        cluster: ClusterSpec | None,
        device: torch.device | str | None,
        sync_batchnorm: bool | None,
        flush_denormals: bool,
        outer: Outer | None = None,
    ) -> None:
        super().__init__(cluster, flush_denormals, outer)
        self.device = choose_device(device, self.cluster)
        self._sync_batchnorm = sync_batchnorm
        self._group: Collective = IdentityCollective()  # of the data shards, once they have met
        self._parts: Collective = IdentityCollective()  # of the model
        self._seed = 0
        self._entered: Batch | None = None
        self._needs_context = self._synchronized = False
        divide_cores(self.cluster)

    @flushed
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
        precision = choose_precision(precision, self.device)
        if accumulate < 1:
            raise UserError(f"accumulate={accumulate}", "At least one batch makes an update.")
        if clip_norm is not None and not clip_norm > 0:
            raise UserError(f"clip_norm={clip_norm}", "The norm of a gradient is above 0.")
        if self.cluster.world_size > 1 or self.cluster.addresses.get("ps"):
            check_initialized(model)
        check_undivided(model)
        if not self._takes_shards:
            check_whole(model)
        if is_unmade(model):
            plan_values(unwrap(model), precision)
            with making(unwrap(model)):
                self._lay_out(unwrap(model))
        if not is_unmade(model):
            model.to(self.device)
        convert(model, precision)
        made = make_optimizer(optimizer, model)
        check_optimizer(made, model, self.cluster.world_size)
        fuse(made, model)
        if self.device.type == "cpu" and self.cluster.rank != NO_RANK:
            check_memory(optimizer_parameters(made), made, self._state_fraction)
        synchronized = self._sync_batchnorm
        if synchronized is None:
            synchronized = deterministic or asks_for_synchronization(model)
        self._synchronized = self._synchronized or synchronized
        if synchronized:
            synchronize_batchnorm(model)
        randomness = globalize(model) if deterministic else None
        self._seed = seed
        self._needs_context = self._needs_context or synchronized or deterministic
        tensors = _tensors(model)
        self._group, self._parts = self._summing(), self.groups.model
        self._share(model, list(tensors.values()))
        clipping.watch(self._pairs, self._holds_parts, self._are_summed_later)
        whole, gradients = self._gradients(model, made)
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        pair = Pair(
            whole, made, gradients, accumulate, clip_norm, precision, dtype, tensors, seed,
            randomness, make_loss_scale(precision, self.device),
        )  # fmt: skip
        self._pairs.add(pair)
        ask_before_steps(made, self._step_by_hand)
        return whole, made

    def step(self, batch: Batch, loss: LossFunction | None, *, stop: bool = False) -> StepResult:
        pair = self._pairs.only
        output = self._compute(pair, batch, loss)
        if not self._is_due(pair):
            return StepResult(output, batch.global_size)
        return self._update(pair, output, batch.global_size, stop)

    def flush(self) -> StepResult | None:
        pair = self._pairs.meant("flush()")
        if not pair.passes:
            return None
        return structs.replace(self._update(pair, None, 0, False), batches=0)

    def evaluate(self, batch: Batch, loss: LossFunction | None) -> tuple[float, float, Any]:
        has_rows = bool(batch.size)
        if not has_rows and not self._runs_without_rows:
            return 0.0, 0.0, None
        pair = self._pairs.meant("evaluate()")
        self._look_at_norms(pair)
        batch = in_dtype(batch if has_rows else _of_spare_rows(batch), pair.dtype)
        with torch.no_grad(), autocast(pair.precision, self.device):
            if loss is None:
                output, found = self._look_at_own(pair, batch)
            else:
                output = forward(pair.model, batch.data)
                found = look(loss, output, batch)
                if self._divides:
                    found = pair.comparisons.look(loss, output, batch, found)
        self._look_at(found, pair.randomness is not None)
        if not has_rows:  # others may have waited for this pass; it counts for nothing
            return 0.0, 0.0, None
        return float(found.total), float(found.weight), output

    def predict(self, batch: Batch, has_loss: bool) -> Any:
        pair = self._pairs.meant("predict()")
        self._look_at_norms(pair)
        runs_spare = not batch.size and self._runs_without_rows
        data = in_dtype(_of_spare_rows(batch) if runs_spare else batch, pair.dtype).data
        with torch.no_grad(), autocast(pair.precision, self.device):
            output = forward(pair.model, data, has_loss)
        if runs_spare:
            output = rows(output, lambda tensor: tensor[:0] if tensor.dim() else tensor)
        if not has_loss and isinstance(output, Mapping):
            return {k: v for k, v in output.items() if k not in ("loss", "num_items")}
        return output

    @flushed
    def backward(self, losses: Any, batch: Batch) -> None:
        found = weigh(losses, batch)
        self._look_at(found, any(pair.randomness is not None for pair in self._pairs.all))
        sums = self._are_summed_later
        for pair in self._pairs.all if sums else ():
            check_unchanged(pair)
        again = [pair for pair in self._pairs.all if pair.gradients.backward_calls]
        loss_divisor = 0.0
        if again:  # what waits becomes the mean of its own batch, and this one joins it as such
            weights = [found.weight, *(pair.gradients.weight for pair in again)]
            weighed = torch.tensor([float(weight) for weight in weights]).double()
            with self._group.current_call.during("reduce"):  # with those that update together
                total, *before = self._group.all_reduce(weighed).tolist()
            loss_divisor = total or 1.0
            scaled = set[int]()  # a parameter of several optimizers waits with the least of them
            for weight, pair in sorted(zip(before, again, strict=True), key=itemgetter(0)):
                pair.gradients.normalize(weight, scaled)
        for pair in self._pairs.all:
            pair.gradients.backward_calls += 1
            pair.taken = 0
        self._backward(self._pairs.all, found, batch, loss_divisor)
        scaled = set[int]()
        for pair in self._pairs.all:
            if again:
                pair.gradients.normalize(0.0)
            elif not sums and pair.accumulate == 1:  # `.grad` is what it is in plain torch
                pair.gradients.normalize(pair.gradients.weight, scaled)
            if sums:
                pair.edits.note(pair.gradients.parameters)

    @flushed
    def update(self, optimizer: Optimizer) -> None:
        pair = self._pairs.of(optimizer)
        if pair.accumulate > 1:
            what = f"update() after prepare(accumulate={pair.accumulate})"
            raise UserError(what, "In a loop of your own, call it once per so many batches.")
        check_taken(pair)
        self._check_computed(pair)
        take(pair.gradients.parameters, self._pairs.sharing(optimizer))
        self._update(pair, None, 0, False)

    def close(self) -> None:
        self._let_go()
        super().close()

    def _let_go(self) -> None:
        """End what holds in this process while the strategy is in use."""
        enter(None)
        self.denormals.close()
        for pair in self._pairs.all:
            stop_asking(pair.optimizer)

    def _step_by_hand(self, optimizer: Optimizer, given: tuple[Any, ...]) -> bool:
        """``optimizer.step()`` in a loop of the user's own is an update; whether it was one.

        On one device it is the optimizer's own after ``loss.backward()``, as without a strategy.
        """
        pair = self._pairs.of(optimizer)
        if not pair.gradients.backward_calls:
            if self.cluster.world_size == 1 and not self.cluster.addresses.get("ps"):
                return False
            raise stepped_apart(optimizer, self.cluster.num_computing)
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
        if self._are_summed_later:
            check_unchanged(pair)

    def enter(self, batch: Batch) -> None:
        """Tell the modules that look beyond their replica which batch comes next.

        All replicas call it before a batch: parameters that are new since the last one get the
        chief's values. `distribute` does so for the batches that it gives.

        Args:
            batch: The batch that is computed next.
        """
        self._entered = batch
        for pair in self._pairs.in_use:
            if pair.new:
                self._welcome(pair)
        for pair in self._pairs.in_use:
            pair.gradients.before_forward(pair.passes + 1 >= pair.accumulate)
        if self._needs_context:
            seed = self._seed if self._pairs.used is None else self._pairs.used.seed
            step = batch.epoch << 32 | batch.step
            enter(StepContext(self._group, seed, step, batch.global_size, batch.offsets))

    def _divisible(self, chain: Dataset, parts: int) -> Dataset:
        """``chain`` whose batches are cut into ``parts`` so that every BatchNorm can use them."""
        if parts == 1 or not any(local_batchnorms(pair.model) for pair in self._pairs.in_use):
            return chain
        size = chain.batch_size
        if size is not None and size < 2 * parts and self.is_chief:
            warn(
                "a batch of %d rows leaves %d of %d replicas without any: BatchNorm needs two; "
                "take a larger batch, or sync_batchnorm=True",
                size, parts - size // 2, parts,
            )  # fmt: skip
        return replace(chain, least=2)

    def _summing(self) -> Collective:
        """The tasks whose gradients make one update."""
        return self.groups.replicas

    @property
    def _holds_parts(self) -> bool:
        """Whether other tasks have other parts of an update's gradients."""
        return self._parts.world_size > 1

    @property
    def _are_summed_later(self) -> bool:
        """Whether an update needs the gradients of other replicas too."""
        return self._group.world_size > 1

    @property
    def _state_fraction(self) -> float:
        """The part of the optimizer's state that this process holds."""
        return 0.0

    def _lay_out(self, model: nn.Module) -> None:
        """Give a model without values those that this task keeps; all tasks call it."""
        make_all(model)

    @abstractmethod
    def _share(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """Give every replica the chief's values of these parameters and buffers of ``model``."""

    @abstractmethod
    def _gradients(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Gradients]:
        """The gradients of ``optimizer``'s parameters, and the model that produces them."""

    @abstractmethod
    def _update(self, pair: Pair, output: Any, examples: int, stop: bool) -> StepResult:
        """Make one update of the gradients that wait, and clear them."""

    def _welcome(self, pair: Pair) -> None:
        """Take in what was put into the model after it was prepared."""
        model = unwrap(pair.model)
        check_members(pair.optimizer, model)
        fuse(pair.optimizer, model)
        if self._synchronized:
            synchronize_batchnorm(model)
        known, pair.shared = pair.shared, _tensors(model)
        self._share(model, [tensor for key, tensor in pair.shared.items() if key not in known])

    def _compute(self, pair: Pair, batch: Batch, loss: LossFunction | None) -> Any:
        """The output for a batch, whose gradients wait with those before.

        A replica without rows runs the model on spare ones, which count for nothing: others may
        wait for it in the forward pass, and what a module counts stays equal everywhere.
        """
        if self._entered is not batch:
            self.enter(batch)
        self._entered = None  # computed again, it is entered again
        output = None
        if batch.size:
            output, found = self._forward(pair, batch, loss)
            self._backward([pair], found, batch)
        elif self._runs_without_rows:
            with keeping_statistics(pair.model):
                found = self._forward(pair, _of_spare_rows(batch), loss)[1]
                self._backward([pair], structs.replace(found, weight=0.0), batch)
        else:
            pair.gradients.begin(self._loss_divisor(batch))
        pair.passes += 1
        return output

    def _forward(
        self, pair: Pair, batch: Batch, loss: LossFunction | None
    ) -> tuple[Any, WeightedLoss]:
        batch = in_dtype(batch, pair.dtype)
        if pair.precision == "fp32" and pair.randomness is None:
            output = forward(pair.model, batch.data, loss is not None)
            given = evaluate_loss(loss, output, batch)
            return output, self._weigh(pair, loss, output, given, batch)
        with autocast(pair.precision, self.device):
            output = forward(pair.model, batch.data, loss is not None)
            divided = pair.randomness is not None and self._group.world_size > 1
            with RandomnessForbidden() if divided else nullcontext():
                given = evaluate_loss(loss, output, batch)
            return output, self._weigh(pair, loss, output, given, batch)

    def _weigh(
        self, pair: Pair, loss: LossFunction | None, output: Any, given: Any, batch: Batch
    ) -> WeightedLoss:
        """The sum and weight of what ``loss`` said of ``output``."""
        found = weigh(given, batch)
        if self._divides:
            found = pair.comparisons.look(loss, output, batch, found)
        self._look_at(found, pair.randomness is not None)
        return found

    def _look_at_own(self, pair: Pair, batch: Batch) -> tuple[Any, WeightedLoss]:
        """The output and the loss of a model that computes it, which may tell no divisor.

        So it is asked once with the graph of all layers, which costs memory, and then only where
        that told something.
        """
        output, found = look_at_own(pair.model, batch, pair.looks_from_first or False)
        if pair.looks_from_first is None:
            pair.looks_from_first = needs_all(pair.model, batch, output, found)
            if pair.looks_from_first:
                return look_at_own(pair.model, batch, from_first=True)
        return output, found

    @property
    def _divides(self) -> bool:
        """Whether a loss is computed of parts of a global batch."""
        return self.num_replicas > 1

    def _look_at_norms(self, pair: Pair) -> None:
        """Before a model evaluates parts of batches for the first time: what depends on them."""
        if self._divides and not pair.evaluates:
            check_evaluation(pair.model, pair.randomness is not None)
            pair.evaluates = True

    def _look_at(self, found: WeightedLoss, deterministic: bool) -> None:
        """Refuse a loss of which the parts make no exact mean, or say so."""
        if found.doubt and self._divides:
            doubt(found.doubt, deterministic)

    @property
    def _runs_without_rows(self) -> bool:
        """Whether a forward pass is also made where there are no rows."""
        return self.groups.world.world_size > 1

    def _loss_divisor(self, batch: Batch) -> float:
        """What a backward pass over ``batch`` divides by: the planned size of an update's batch."""
        return float(batch.global_size)

    def _is_due(self, pair: Pair) -> bool:
        """Whether the batches so far make an update."""
        return pair.passes >= pair.accumulate

    def _backward(
        self, pairs: Sequence[Pair], found: WeightedLoss, batch: Batch, loss_divisor: float = 0.0
    ) -> None:
        """Add the gradients of a loss, divided by ``loss_divisor`` (0: that of those that wait)."""
        if not found.value.requires_grad:
            raise UserError(
                "the loss has no gradient: it depends on no parameter that learns",
                "Compute it from the model's output by differentiable functions of torch, "
                "and leave requires_grad on where it is to learn.",
            )
        for pair in pairs if self._group.world_size > 1 else ():
            if new := pair.new:
                raise UserError(
                    f"{len(new)} parameters were put into the model after this batch was given "
                    "out: each replica computed with its own values of them",
                    "Change the model between two calls of fit, or before the loop takes a batch.",
                )
        if len(pairs) > 1 and any(pair.loss_scale.value != 1 for pair in pairs):
            raise UserError(
                f"a backward pass for {len(pairs)} prepared models with precision='fp16'",
                "Each has a loss scale of its own: choose bf16, or prepare one model.",
            )
        is_mean = loss_divisor > 0
        for pair in pairs:
            own = pair.gradients.begin(loss_divisor or self._loss_divisor(batch))
            loss_divisor = loss_divisor or own
            if not is_mean:
                pair.gradients.rescale(loss_divisor)
        counts = found.counts
        scale = found.scale / loss_divisor if counts else 0.0
        gradient = pairs[0].loss_scale.scale(first_gradient(found.value, scale))
        draws = [pair for pair in pairs if pair.randomness is not None]
        try:
            if counts and not draws:
                self._run_backward(found.value, gradient)
            else:
                with ExitStack() as stack:
                    for pair in () if counts else pairs:
                        stack.enter_context(pair.gradients.discarding())
                    if draws:
                        stack.enter_context(replaying())
                    self._run_backward(found.value, gradient)
        except BaseException:  # some parameters have a gradient of this pass, and some have not
            for pair in pairs:
                pair.gradients.clear()
                pair.passes = 0
            raise
        loss = found.total
        for pair in pairs:
            pair.gradients.add(loss, found.weight)

    def _run_backward(self, value: Tensor, gradient: Tensor) -> None:
        backward(value, gradient)


def _of_spare_rows(batch: Batch) -> Batch:
    """A batch without rows, with its spare rows as data."""
    if batch.spare is None:
        return batch
    return structs.replace(batch, data=batch.spare, size=count_rows(batch.spare))


def _tensors(model: nn.Module) -> dict[int, Tensor]:
    """The parameters and buffers of ``model`` by id."""
    return {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
