"""What the synchronous strategies share: equal copies that update together after every step."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.checkpoint.boxes import Cut
from spartito.checkpoint.saved import Saved
from spartito.cluster.recovery import Recovery
from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective
from spartito.collectives.process_group import ProcessGroupCollective
from spartito.collectives.rendezvous import Rendezvous
from spartito.collectives.shared_memory import SharedMemoryCollective
from spartito.data.batch import Batch
from spartito.data.dataset import Dataset, as_dataset
from spartito.data.loader import Loader
from spartito.data.source import PerWorker
from spartito.engine import clipping
from spartito.engine.checksum import DriftedError
from spartito.engine.compression import Compression, Whole
from spartito.engine.context import enter
from spartito.engine.ddp import Overlapped, OverlappedGradients
from spartito.engine.gradients import Gradients, LocalGradients, Number, PackedGradients
from spartito.engine.loss import LossFunction
from spartito.engine.optimizers import OptimizerLike, skipping
from spartito.engine.sliced import SlicedGradients
from spartito.errors import SpartitoError, TaskLostError, UserError
from spartito.local.joined import JoinedGroups
from spartito.local.values import Replicas, Values
from spartito.steps.coordination import SynchronousCoordination
from spartito.steps.distributed import Distributed, StepResult
from spartito.steps.groups import Groups, one_shard_each, send
from spartito.steps.outer import Outer
from spartito.steps.pair import Pair
from spartito.steps.recovering import (
    Aboard,
    Repeating,
    Standing,
    chosen_recovery,
    share_state,
)
from spartito.steps.replica import ReplicaStep
from spartito.steps.sharing import Placed, Together


class SynchronousStep(ReplicaStep):
    """Every replica computes its part of the global batch; gradients are averaged exactly."""

    _divides_updates = True  # where replicas share memory
    _recovers = False  # from the loss of a task: each has all of the state

    def __init__(
        self,
        *,
        cluster: ClusterSpec | None = None,
        device: torch.device | str | None = None,
        sync_batchnorm: bool | None = None,
        timeout: float | None = None,
        communication: str = "auto",
        find_unused_parameters: bool | None = None,
        flush_denormals: bool = True,
        recovery: Recovery | None = None,
        outer: Outer | None = None,
    ) -> None:
        """Connects to nobody: that is done in `prepare`.

        Args:
            cluster: The tasks of the job; None asks the environment.
            device: Where this process computes; None is its own GPU, else the CPU.
            sync_batchnorm: Whether BatchNorm is one over the global batch; None: where training
                is deterministic.
            timeout: Seconds that a wait for another task may take; None is ``SPARTITO_TIMEOUT``.
            communication: "auto" is the fastest way that all replicas share: on CPUs shared memory
                inside a machine and sockets between machines, on GPUs NCCL. "sockets" leaves
                shared memory out. "process_group" is gloo or NCCL in any case; "ddp" too, and
                reduces while backward runs, as on GPUs.
            find_unused_parameters: With "ddp": True searches in every step for parameters that
                get no gradient, False refuses them, None does what the first update needs.
            flush_denormals: Whether denormal numbers are 0 where replicas compute, which is faster.
            recovery: How `Trainer.fit` goes on when a task is lost, under mirrored,
                multi_worker_mirrored and sharded on CPUs; None asks ``SPARTITO_RECOVERY``, without
                which a loss ends the training. Each replica then makes the whole update, or keeps
                a second copy of its shard.
            outer: How groups of replicas agree; None: there is one, which does so in every step.

        Raises:
            UserError: For a cluster, device or communication that this strategy cannot have.
        """
        super().__init__(cluster, device, sync_batchnorm, flush_denormals, outer)
        recovers = self._recovers and not self.outer.name
        if recovery is not None and not recovers:
            raise UserError(
                f"recovery under {self._called}",
                "Choose mirrored, multi_worker_mirrored or sharded.",
            )
        if recovers:
            self.recovery = chosen_recovery(recovery, self.cluster, communication, self.device)
        self._repeating = None if self.recovery is None else Repeating()
        self.aboard: Aboard | None = None
        """What rides along with each update, while a training that recovers runs."""
        self.fits = 0
        """Trainings that recover, of all trainers of this strategy, the present one included."""
        rendezvous = Rendezvous(
            self.cluster, self.device, timeout, communication, recovery=self.recovery
        )
        connect = partial(self.outer.connect, inner=self.connect)
        self.groups = Groups(rendezvous, self.cluster, connect)
        self.coordination = SynchronousCoordination(
            self._called, self.job, self.cluster, self._pairs, self.groups, self.outer
        )
        self._overlaps = self._own_shard[1] > 1 and (
            communication == "ddp" or (communication == "auto" and self.device.type == "cuda")
        )
        self._finds_unused = find_unused_parameters
        self._overlapped: list[Overlapped] = []
        self._leave = weakref.finalize(self, _leave, self._overlapped, self.groups)

    @staticmethod
    def connect(rendezvous: Rendezvous, cluster: ClusterSpec) -> Mapping[str, Collective]:
        """Find this task's groups; all tasks call it, when the first group is needed.

        Args:
            rendezvous: Makes groups of ranks, for tasks that ask for them in the same order.
            cluster: The tasks that train.

        Returns:
            The collectives "world", "data" and "model".

        Raises:
            TaskLostError: If a task does not come in time.
        """
        return one_shard_each(rendezvous, cluster)

    def regroup(self, cause: TaskLostError | None) -> bool:
        """Leave all groups, and meet those who live, and those who are new; all of them call it.

        The batches since the last update are forgotten.

        Args:
            cause: The loss; None where nobody was lost.

        Returns:
            Whether this task was there when the others met last: what it has is of no use if they
            went on without it.

        Raises:
            TaskLostError: Too few are left, or none of them is this one.
        """
        enter(None)
        for pair in self._pairs.all:
            if self._repeating is not None:
                self._repeating.undo(pair)
            pair.gradients.leave()
        before = self.groups.generation
        self.cluster = self.coordination.cluster = self.groups.regroup(cause)
        return self.groups.generation == before + 1

    def meet_again(
        self, own: Standing, training: Callable[[], dict[str, Any]]
    ) -> tuple[Standing, dict[str, Any] | None]:
        """After `regroup`: connect the groups, and have all go on from one state.

        Args:
            own: How far this task is.
            training: What it has beside models and optimizers.

        Returns:
            How far all are now, and where this task took over a state what ``training`` returned
            elsewhere.

        Raises:
            TaskLostError: Another one is lost; then all `regroup` once more.
        """
        self._group, self._parts = self._summing(), self.groups.model
        with self.coordination.during("prepare"):
            found = self._share_all(own, training)
            for pair in self._pairs.all:
                pair.gradients = self._gradients(pair.model, pair.optimizer)[1]
        clipping.watch(self._pairs, self._holds_parts, self._are_summed_later)
        return found

    def _share_all(
        self, own: Standing, training: Callable[[], dict[str, Any]]
    ) -> tuple[Standing, dict[str, Any] | None]:
        """Bring all tasks to one state; as `share_state`."""
        return share_state(self._group, self._pairs.all, own, training)

    def keep_copies(self) -> None:
        """Before a training that recovers, on all tasks: what one of them alone has, is kept."""

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
        self.outer.check(model, precision, self)
        found = super().prepare(
            model, optimizer, accumulate=accumulate, clip_norm=clip_norm, precision=precision,
            deterministic=deterministic, seed=seed,
        )  # fmt: skip
        self._couple(self._pairs.of(found[1]))
        return found

    def _couple(self, pair: Pair) -> None:
        """Couple what this task has of a pair with what other groups have of it."""
        self.outer.add(pair, self)

    def step(self, batch: Batch, loss: LossFunction | None, *, stop: bool = False) -> StepResult:
        self.outer.begin()
        with self.outer.telling(), self._group.current_call.during("step"):
            if self.coordination.skips_nonfinite and not self._pairs.only.passes:
                self._pairs.only.keep_buffers()
            return super().step(batch, loss, stop=stop)

    def update(self, optimizer: Optimizer) -> None:
        with self.outer.telling():
            super().update(optimizer)

    def flush(self) -> StepResult | None:
        self.outer.begin()
        with self.outer.telling():
            found = super().flush()
            self.outer.flush(self._pairs.only)
        return found

    def keep(self) -> Callable[[], None]:
        if self.outer.name:
            self.synchronize()  # what all groups have together
        return super().keep()

    def values(self, pair: Pair, column: JoinedGroups) -> Values:
        """What this task has of a pair's parameters, for groups that merge them.

        Args:
            pair: A prepared one.
            column: Those who have the same, by their groups.
        """
        step = weakref.proxy(self)  # which has what has these values

        def cuts() -> Mapping[str, Cut]:
            found: Mapping[str, Cut] = step._cuts(pair, "model")
            return found

        def fractions(parameters: Sequence[nn.Parameter]) -> Sequence[float]:
            found: Sequence[float] = step.fractions(pair, parameters)
            return found

        return Replicas(pair.model, column, self.groups.model, cuts, fractions)

    def fractions(self, pair: Pair, parameters: Sequence[nn.Parameter]) -> list[float]:
        """What each parameter here counts for in a sum over the tasks of one model.

        Args:
            pair: A prepared one.
            parameters: Of its model.

        Returns:
            Of each 1 over the tasks that have the same.
        """
        return [1.0] * len(parameters)

    def distribute(
        self, dataset: Any, *, seed: int | None = None, training: bool = True
    ) -> Distributed:
        shard, order = self.data_shard, self._seed if seed is None else seed
        chain: Dataset = as_dataset(dataset)
        chain = self._divisible(chain, shard[1]) if training else chain
        if training:
            chain = self.outer.divided(chain, self._pairs.in_use)
        loader, group = Loader(chain, shard, order), self.groups.data
        uneven = isinstance(chain.source, PerWorker) and shard[1] > 1
        batches = Together(loader, group) if uneven else loader
        pairs = self._pairs if training else None
        pair = self._pairs.used or next(iter(self._pairs.all), None)
        if pair is not None and training and chain.steps_per_epoch is not None:
            self.outer.tell_length(-(-chain.steps_per_epoch // pair.accumulate))
        return self._placed(batches, self.device, self.enter, group, self.denormals, pairs)

    def _placed(self, *args: Any) -> Placed:
        return self.outer.placed(Placed, *args)

    def _compute(self, pair: Pair, batch: Batch, loss: LossFunction | None) -> Any:
        if self._repeating is None or self.aboard is None:  # in a loop of the user's own, too
            return super()._compute(pair, batch, loss)
        self._repeating.begin(pair, batch, self.data_shard[0])
        output = super()._compute(pair, batch, loss)
        if output is not None:
            self.aboard.saw(output, batch)
        return output

    def close(self) -> None:
        try:
            self._compare_at_end()
        finally:
            self._let_go()
            self._leave()

    def _compare_at_end(self) -> None:
        """Compare the replicas after a loop of the user's own, in which nothing else does.

        Who does not come to this has no part in it: others may close long before.
        """
        unseen, self._pairs.unseen = self._pairs.unseen, False
        if not unseen or self.cluster.world_size == 1 or sys.exc_info()[1] is not None:
            return
        try:
            with self.coordination.during("close"):
                self.coordination.compare()
        except DriftedError:
            raise
        except SpartitoError:
            pass

    def _state(self, pair: Pair) -> dict[str, Any]:
        self.coordination.compare()
        state = super()._state(pair)
        return self.outer.saved(pair, state, self._cuts(pair, "optimizer"))

    def _is_divided(self, pair: Pair) -> bool:
        return self.outer.has(pair) or super()._is_divided(pair)

    def _load(self, saved: Saved) -> None:
        super()._load(saved)
        pair = self._pairs.only
        self._load_outer(pair, saved)

    def _load_outer(self, pair: Pair, saved: Saved) -> None:
        """Take back what each group alone has."""
        self.outer.load(pair, saved, self._cuts(pair, "optimizer"), self._with_state(pair))

    @property
    def _state_fraction(self) -> float:
        return 1.0

    def _share(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """The chief's values to all."""
        if self.cluster.world_size > 1:
            with self.coordination.during("prepare"):
                send(self.groups.world, tensors)

    def _gradients(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Gradients]:
        group = self._group
        if group.world_size == 1:
            return model, LocalGradients(optimizer)
        if self._overlaps and isinstance(group, ProcessGroupCollective):
            sharing = self._pairs.sharing(optimizer)
            for pair in sharing:
                if isinstance(pair.gradients, OverlappedGradients):
                    pair.gradients.give_up_overlap()
            whole = Overlapped(model, group)
            self._overlapped.append(whole)
            compression = self._new_compression()
            overlapped = OverlappedGradients(
                optimizer, group, whole, self._finds_unused, compression
            )
            overlapped.shares = bool(sharing)
            return whole, overlapped
        if (
            self._divides_updates
            and self.recovery is None
            and isinstance(group, SharedMemoryCollective)
        ):
            return model, SlicedGradients(optimizer, group)
        return model, PackedGradients(optimizer, group)

    def _new_compression(self) -> Compression:
        """How one optimizer's gradients are sent where DDP sends them."""
        return Whole()

    def _update(self, pair: Pair, output: Any, examples: int, stop: bool) -> StepResult:
        return self.outer.update(pair, lambda: self._update_group(pair, output, examples, stop))

    def _update_group(self, pair: Pair, output: Any, examples: int, stop: bool) -> StepResult:
        """Make an update of one's own group."""
        randomness = pair.randomness
        drawn = () if randomness is None else randomness.piggybacked()
        scaled = pair.precision == "fp16"  # torch's scaler is what skips steps then
        pair.gradients.whole = scaled or self._parts.world_size > 1
        aboard = self.aboard
        with self._group.current_call.during("update"):
            brought = (float(stop), *drawn, *(aboard.brings() if aboard is not None else ()))
            weight, loss, (stops, *rest) = pair.gradients.reduce(brought)
            if self._parts.world_size > 1:  # of one model: they end together too
                stops = self._end_together(stops, loss)
        pair.gradients.summed = True
        if randomness is not None:
            randomness.check(rest[:2])
        dropped = False
        with skipping(pair.optimizer, float(weight) if scaled else weight) as is_due:
            if is_due:
                pair.loss_scale.unscale(pair.optimizer, self._parts)
                dropped = self._is_dropped(pair, loss)
                if not dropped:
                    self._optimize(pair)
        pair.gradients.clear()
        pair.passes = 0
        if dropped:
            pair.restore_buffers()
            loss = weight = 0.0
        if self._repeating is not None:
            self._repeating.end(pair)
        if aboard is not None:  # last: an update of shards may still be undone
            aboard.brought(rest[len(drawn) :])
        if not pair.is_compared:
            pair.is_compared = True
            if randomness is not None and self.recovery is None:  # else some may be here later
                self.coordination.compare_buffers()
        return StepResult(
            output,
            examples,
            updates=1,
            loss=loss,
            weight=weight,
            stop=stops > 0,
            dropped=int(dropped),
        )

    def _is_dropped(self, pair: Pair, loss: Number) -> bool:
        """Clip the gradients; whether they are of no use. In fp16 the scaler finds that out."""
        skips = self.coordination.skips_nonfinite and pair.precision != "fp16"
        if pair.clip_norm is None and not skips:
            return False
        norm = self.global_norm(pair)
        if skips and not (isfinite(norm) and isfinite(loss)):
            return True
        if pair.clip_norm is not None:
            pair.gradients.clip(pair.clip_norm, norm)
        return False

    def _end_together(self, stops: float, loss: Number) -> float:
        """How many of the tasks of one model have asked for an end."""
        return self._parts.all_reduce(torch.tensor([stops], dtype=torch.float64)).item()

    def global_norm(self, pair: Pair) -> Tensor:
        """The L2 norm of an update's gradients, those of other tasks' parameters included.

        Args:
            pair: The prepared pair, whose gradients are reduced.

        Returns:
            A scalar; where every task has all of the model its own gradients tell.
        """
        return pair.gradients.norm()

    def _optimize(self, pair: Pair) -> None:
        """Let the optimizer use the reduced gradients."""
        pair.gradients.update(lambda: pair.loss_scale.step(pair.optimizer))


def _leave(overlapped: list[Overlapped], groups: Groups) -> None:
    """Leave the groups: by `close`, with the strategy, or when the process ends.

    gloo aborts a process that ends with its group open. DDP goes first: else letting go of it would
    wait for the group's threads with the interpreter's lock, which one of them may want.
    """
    for model in overlapped:
        model.unwrap()
    groups.close()
