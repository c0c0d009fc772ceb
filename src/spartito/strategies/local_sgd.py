"""Groups of replicas: synchronous inside, and loosely coupled with each other."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.checkpoint.saved import Saved
from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective
from spartito.collectives.placement import PROCESS_GROUP
from spartito.data.batch import Batch
from spartito.data.dataset import Dataset, as_dataset
from spartito.declared import Declared
from spartito.engine.batchnorm import has_batchnorm
from spartito.engine.loss import LossFunction
from spartito.engine.optimizers import NoOptimizer, OptimizerLike
from spartito.errors import SpartitoError, UserError
from spartito.local import sending
from spartito.local.coupling import Coupling
from spartito.local.fragments import Fragments
from spartito.local.joined import JoinedGroups
from spartito.local.outer import Average, Outer, choose
from spartito.local.plan import (
    TOKENS,
    Asked,
    Sites,
    check_groups,
    check_weights,
    shards_inside,
    updates_between,
)
from spartito.local.sites import Hierarchy, JoinedSites
from spartito.local.turns import turns_of
from spartito.local.values import Replicas, Shards, Values
from spartito.log import warn
from spartito.strategies.coupled import ALIKE, Coupled, Grouping, LocalCoordination, told
from spartito.strategies.distributed import Distributed, StepResult
from spartito.strategies.group_states import (
    SECTION,
    accumulated_by_all,
    in_parts,
    like_of,
    load_own,
    states_of,
)
from spartito.strategies.pair import Pair
from spartito.strategies.sharding import BLOCK, ShardingStrategy, check_shards
from spartito.strategies.sharing import Placed


class LocalSGDStrategy(ShardingStrategy):
    """Groups of replicas that meet every so many updates (Stich 2019; DiLoCo, Douillard 2023).

    Inside a group all is as under mirrored and multi_worker_mirrored, or as under sharded. Between
    meetings nothing goes from group to group.
    """

    name = "local_sgd"

    def __init__(
        self,
        groups: Asked = 2,
        every: int | Sequence[int] = 20,
        outer: Outer = None,
        weights: str = TOKENS,
        compress: str | None = None,
        fragments: int = 1,
        sites: Sites = None,
        overlap: bool | int = False,
        mixing: float | None = None,
        inside: Declared | str | None = None,
        *,
        zero: int | None = None,
        block_bytes: int | None = None,
        cluster: ClusterSpec | None = None,
        device: torch.device | str | None = None,
        sync_batchnorm: bool | None = None,
        timeout: float | None = None,
        communication: str = "auto",
        flush_denormals: bool = True,
    ) -> None:
        """Connects to nobody: that is done in `prepare`.

        Args:
            groups: How many groups of neighbours, the ranks of each (``[[0, 1], [2]]``), or
                "machine".
            every: How many updates a group makes from one meeting to the next. There is one at the
                end of each epoch, too. With ``sites`` two numbers: from one meeting of neighbours
                to the next one, and of all, a multiple of it.
            outer: What a meeting makes of the groups' mean difference: None averages the models;
                "diloco" or ``{"lr": 0.7, "momentum": 0.9}`` is Nesterov's momentum; a function of
                the parameters returns any torch optimizer.
            weights: "tokens": a group counts for what its losses were divided by since the last
                meeting (examples, tokens); "equal": all count the same.
            compress: How what a group has moved goes to the others: None is as it is; "bf16",
                "8bit" and "4bit" numbers of fewer bits; "topk", "topk:0.01" the largest of them.
                What is left out is added to what is sent at the next meeting.
            fragments: Parts of the model, of whole layers, that meet in turn: each after ``every``
                updates, and no two after the same.
            sites: How many sites of neighbouring groups there are, or the numbers of the groups of
                each (``[[0, 1], [2]]``). Groups of a site average their models; ``outer`` and
                ``compress`` are for the meetings of all, in which a site goes by its average.
            overlap: For how many updates what a group has moved is under way to the others while
                training goes on; True is a quarter of ``every``, and less than from one fragment's
                meeting to the next one's; False waits for it.
            mixing: How much of its own values a group keeps at a meeting, from 0 to 1; None is
                half of it with ``overlap``, else 0. At the end of an epoch nothing is kept.
            inside: What holds in a group: None or "mirrored" is all of the model on each replica;
                "sharded" is a model in shards, as under `ShardedStrategy`, with its options as in
                "sharded(zero=2)": groups are of one size, and those with the same shard meet.
            zero: With "sharded" what is in shards, 1, 2 or 3; None is 3.
            block_bytes: With "sharded" the size from which on a module is a block of its own.
            cluster: As under `SynchronousStrategy`, like all that follows.
            device: Where this process computes: a CPU.
            sync_batchnorm: Whether BatchNorm is one over the group's part of a batch.
            timeout: Seconds that a wait for another task may take.
            communication: "auto" or "sockets".
            flush_denormals: Whether denormal numbers are 0.

        Raises:
            UserError: For groups that the job cannot have, or another value that cannot be.
        """
        near, self._every = updates_between(every, sites)
        check_weights(weights)
        self._turns = turns_of(fragments, near, overlap, mixing)
        if sites is not None and (self._turns.delay or self._turns.mixing):
            raise UserError(
                f"overlap={overlap!r}, mixing={mixing!r} with sites",
                "Sites wait for their meetings: leave one of them out.",
            )
        self._turn = self._every // near
        self._asked, self._sites, self._weights = groups, sites, weights
        self._outer, self._exchange = choose(outer), sending.choose(compress)
        shards = shards_inside(inside, sites, {"zero": zero, "block_bytes": block_bytes})
        cut = {"zero": 3, "block_bytes": BLOCK, **(shards or {})}
        check_shards(**cut)
        if communication in PROCESS_GROUP:
            raise UserError(
                f"local_sgd with communication={communication!r}", "Choose 'auto' or 'sockets'."
            )
        super().__init__(
            0 if shards is None else cut["zero"],
            cut["block_bytes"],
            cluster=cluster,
            device=device,
            sync_batchnorm=sync_batchnorm,
            timeout=timeout,
            communication=communication,
            flush_denormals=flush_denormals,
        )
        if self.device.type != "cpu":
            raise UserError(
                f"local_sgd on {self.device}: it runs on CPUs",
                "Choose mirrored or multi_worker_mirrored for GPUs, or device='cpu'.",
            )
        asked = (1, None) if self.is_evaluator else (groups, sites)
        is_average = isinstance(self._outer, Average)
        self._grouping = Grouping(*asked, not is_average, self._turns.delay > 0, self._zero > 0)
        self.groups.connect = self._grouping.connect
        self._couplings: dict[int, Fragments] = {}
        self._warned = self._resumed = False
        self.coordination: LocalCoordination = LocalCoordination(
            self, self._grouping, self._couplings, self._homes, self._zero < 3
        )

    def check(self, cluster: ClusterSpec) -> None:
        super().check(cluster)
        check_groups(self._asked, self._sites, cluster.world_size, self._zero > 0)

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
        self.groups.meet()
        world = self._grouping.world
        if world is not None:
            self._check(precision)
        prepared = super().prepare(
            model, optimizer, accumulate=accumulate, clip_norm=clip_norm, precision=precision,
            deterministic=deterministic, seed=seed,
        )  # fmt: skip
        pair = self._pairs.of(prepared[1])
        if world is not None and not isinstance(pair.optimizer, NoOptimizer):
            made = Fragments(pair.model, lambda: self._coupling(pair, world), self._turns)

            def follow() -> str:
                made.follow(pair.gradients.parameters, strict=True)
                return ""

            with self.coordination.during("prepare"):
                self.coordination.attempt(follow)
            self._couplings[id(pair.optimizer)] = made
        return prepared

    def _coupling(self, pair: Pair, world: JoinedGroups) -> Coupling | Hierarchy:
        model, weights = pair.model, self._weights
        values: Values = Replicas(model, world)
        if self._zero:
            values = Shards(model, world, self.groups[ALIKE], self._homes)
        values.only_finite = self.coordination.skips_nonfinite
        made = Coupling(values, self._outer, weights, self._exchange())
        if not isinstance(world, JoinedSites):
            return made
        inside = Replicas(model, world.inside)
        inside.only_finite = values.only_finite
        near = Coupling(inside, Average(), weights, sending.Whole())
        return Hierarchy(near, made, world, self._turn)

    @property
    def _owners(self) -> int:
        return len(self._grouping.members[self._grouping.index]) if self._zero else 1

    def _check(self, precision: str) -> None:
        """Refuse what groups would do each in its own way."""
        if precision in ("fp16", "16-mixed"):
            raise UserError(
                "precision='fp16' under local_sgd: each group would have its own loss scale",
                "Choose precision='bf16'.",
            )

    def distribute(
        self, dataset: Any, *, seed: int | None = None, training: bool = True
    ) -> Distributed:
        found = super().distribute(dataset, seed=seed, training=training)
        pair = self._pairs.used or next(iter(self._pairs.all), None)
        steps = as_dataset(dataset).steps_per_epoch if training else None
        if pair is not None and steps is not None and self._grouping.world is not None:
            self._check_length(-(-steps // pair.accumulate))
        return found

    def step(self, batch: Batch, loss: LossFunction | None, *, stop: bool = False) -> StepResult:
        self._take_back()
        with self._telling():
            return super().step(batch, loss, stop=stop)

    def update(self, optimizer: Optimizer) -> None:
        with self._telling():
            super().update(optimizer)

    def flush(self) -> StepResult | None:
        self._take_back()
        with self._telling():
            rest = super().flush()
            pair = self._pairs.only
            coupling = self._couplings.get(id(pair.optimizer))
            if coupling is not None and coupling.is_apart:
                if not (coupling.meetings or self._resumed):  # of a whole epoch
                    self._check_length(coupling.updates)
                self._meet(pair, coupling.meet_all)
            self._resumed = False
        return rest

    def keep(self) -> Callable[[], None]:
        self.synchronize()
        return super().keep()

    def _check_length(self, updates: int) -> None:
        """Say once that an epoch of so many updates has no meeting but that at its end."""
        if updates < self._every and not self._warned and self.is_chief:
            warn(
                "every=%d, and an epoch has %d update%s: groups meet at its end",
                self._every,
                updates,
                "s"[: updates != 1],
            )
        self._warned = self._warned or updates < self._every

    def _update(self, pair: Pair, output: Any, examples: int, stop: bool) -> StepResult:
        coupling = self._couplings.get(id(pair.optimizer))
        if coupling is None:
            return super()._update(pair, output, examples, stop)
        pair.gradients.refresh()
        self._check_apart(pair)
        coupling.follow(pair.gradients.parameters)
        result = super()._update(pair, output, examples, stop)
        coupling.count(result.weight, result.stop)
        if result.dropped:
            coupling.left_out += 1
            self.coordination.tell_left_out(coupling.left_out)
        asked = coupling.is_due and self._meet(pair, coupling.meet)
        return structs.replace(result, stop=asked)

    def _check_apart(self, pair: Pair) -> None:
        """Refuse an update of parameters that another optimizer has moved since a meeting."""
        several = len(self._grouping.members) > 1
        for other in self._pairs.sharing(pair.optimizer) if several else ():
            coupling = self._couplings.get(id(other.optimizer))
            if coupling is not None and coupling.is_apart:
                raise UserError(
                    f"two optimizers, {type(other.optimizer).__name__} and "
                    f"{type(pair.optimizer).__name__}, with the same parameters under local_sgd "
                    "in several groups: at a meeting each would undo what the other has done",
                    "Give each parameter to one optimizer, or choose mirrored.",
                )

    def _meet(self, pair: Pair, meet: Callable[[], bool]) -> bool:
        """Merge the groups; whether a task of any of them asked for an end."""
        with self._group.current_call.during("update"):
            asked = meet()
        pair.gradients.written()
        return asked

    def _take_back(self) -> None:
        """Go on from one's own group's values, after the merged ones were shown."""
        for pair in self._pairs.all:
            coupling = self._couplings.get(id(pair.optimizer))
            if coupling is not None and coupling.shows_merged:
                self.coordination.check_shown(coupling)
                coupling.take_back()
                pair.gradients.written()

    @contextmanager
    def _telling(self) -> Generator[None]:
        """A block whose error the other groups hear of."""
        try:
            yield
        except SpartitoError as error:
            if self._grouping.world is not None:
                self._grouping.world.abort(error)
            raise

    def _summing(self) -> Collective:
        near = self._grouping.near
        return super()._summing() if near is None else near.inside

    def _share(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        if self.cluster.world_size > 1:
            with self.coordination.during("prepare"):
                self.coordination.compare_models(model)
        super()._share(model, tensors)

    def _placed(self, *args: Any) -> Placed:
        if self._grouping.near is None:
            return super()._placed(*args)
        batches, device, announce, group, denormals, pairs = args
        if pairs is not None:  # those of a training

            def announce(batch: Batch) -> None:
                self._take_back()
                self.enter(batch)

        return Coupled(self._grouping.near, batches, device, announce, group, denormals, pairs)

    def _divisible(self, chain: Dataset, parts: int) -> Dataset:
        """Cut among groups first; two rows for each BatchNorm, also for one that is synchronized.

        It sees the rows of a group, which may be one replica.
        """
        if self._grouping.world is not None:
            norms = any(has_batchnorm(pair.model) for pair in self._pairs.in_use)
            groups = tuple(map(tuple, self._grouping.members))
            chain = replace(chain, least=2 if norms else chain.least, groups=groups)
        return super()._divisible(chain, parts)

    def _is_divided(self, pair: Pair) -> bool:
        return id(pair.optimizer) in self._couplings or super()._is_divided(pair)

    def _state(self, pair: Pair) -> dict[str, Any]:
        state = super()._state(pair)
        coupling = self._settled(pair)
        if coupling is None:
            return state
        index = self._grouping.index
        own = coupling.own_state()
        if index:  # the first group's is in the section of its name
            own["optimizer"] = in_parts(state["optimizer"], self._cuts(pair, "optimizer"))
            state["optimizer"] = {**state["optimizer"], "state": {}}
        if "accumulated" in state:
            own["accumulated"] = state["accumulated"]
            state["accumulated"] = accumulated_by_all(
                pair, state["accumulated"], self.groups.world, self._grouping.is_leader
            )
        common = {**self._grouping.like, "common": coupling.common_state()}
        return {**state, SECTION: {**common, "own": {str(index): own}}}

    def _settled(self, pair: Pair) -> Fragments | None:
        """The groups of a pair, without exchanges under way."""
        coupling = self._couplings.get(id(pair.optimizer))
        if coupling is not None:
            with self._telling():
                coupling.settle()
        return coupling

    def _load(self, saved: Saved) -> None:
        super()._load(saved)
        self._resumed = True
        pair = self._pairs.only
        coupling = self._settled(pair)
        if coupling is None:
            return
        if "optimizer" not in saved or SECTION not in saved:
            coupling.restart()
            return

        def load() -> str:
            index, is_same = self._grouping.index, self._is_like(saved)
            coupling.load(*states_of(saved, index if is_same else None))
            if is_same:
                cuts = self._cuts(pair, "optimizer")
                load_own(pair, saved, index, self._with_state(pair), cuts)
            return ""

        with self._as_shards():
            self.coordination.attempt(load)
        for home in dict.fromkeys(self._homes.values()):
            home.loaded()

    def _is_like(self, saved: Saved) -> bool:
        """Whether a checkpoint is of groups like these; else say what it is of."""
        there, like = like_of(saved), self._grouping.like
        if there != like and self.is_chief:
            warn(
                "the checkpoint is of %s, and here are %s: all go on from the merged model, "
                "with the first group's optimizer", told(there), told(like),
            )  # fmt: skip
        return there == like
