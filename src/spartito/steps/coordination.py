"""Who decides in a training, and how all its tasks come to the same decisions."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from spartito.accelerators import rounding_id
from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective, Traffic
from spartito.engine.drift import OTHER_VALUES, OTHERS_LEARN, different, drifted, moments, outliers
from spartito.engine.modules.batchnorm import average_statistics
from spartito.engine.modules.buffers import (
    caches,
    in_words,
    refuse,
    shared_buffers,
    take_first,
    unlike,
    unlike_caches,
)
from spartito.engine.updates.optimizers import unwrap
from spartito.errors import UnwritableError, UserError
from spartito.fingerprints import checksum
from spartito.notes import warn
from spartito.steps.groups import ALIKE, Groups
from spartito.steps.outer_loops.outer_loop import EveryStep, OuterLoop
from spartito.steps.prepared import Pairs
from spartito.steps.task_record import write_record

T = TypeVar("T")


class Agreement(Protocol):
    """What the tasks of a job compare, and make equal, beside what all strategies do."""

    def settle(self) -> None:
        """Make what all have written into parameters their values; all call this."""
        ...

    def checksum(self, parameters: Sequence[nn.Parameter]) -> int | None:
        """Of what must be equal on all replicas; None: of these parameters' values."""
        ...

    def compare(self, order: int) -> None:
        """Raise `UserError` that names who differs; ``order`` is a checksum of the examples."""
        ...

    def settle_buffers(self) -> None:
        """Make buffers equal, or refuse those that are not."""
        ...


class Account(Protocol):
    """What is told of a model that lies on several tasks."""

    @property
    def traffic(self) -> Traffic:
        """What this task exchanged outside of its groups."""
        ...

    def describe(self) -> dict[str, Any]:
        """What a run's settings tell of it, as JSON."""
        ...

    def conclude(self) -> None:
        """An epoch is over; all tasks call it."""
        ...

    @property
    def hides_outputs(self) -> bool:
        """Whether some tasks see no outputs in training."""
        ...

    @property
    def counts(self) -> bool:
        """Whether what this task finds in outputs is among what `counted` returns."""
        ...

    def counted(self, parts: list[bytes]) -> list[bytes]:
        """What tasks of all data shards have found in outputs: of who has these; all call it."""
        ...


class Alike:
    """Tasks that have each all of a model: there is nothing more to compare, or to tell."""

    traffic = Traffic()
    hides_outputs = False
    counts = True

    def settle(self) -> None:
        """They write into their own."""

    def checksum(self, parameters: Sequence[nn.Parameter]) -> int | None:
        """That of the values."""
        return None

    def compare(self, order: int) -> None:
        """All was compared."""

    def settle_buffers(self) -> None:
        """All are equal."""

    def describe(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def conclude(self) -> None:
        """There is nothing to tell."""

    def counted(self, parts: list[bytes]) -> list[bytes]:
        """All of them."""
        return parts


class Coordination(ABC):
    """The decisions of a training, beside its computation: who makes them, and who hears of them.

    A `Step` has one, as its ``coordination``. The trainer calls it at the edges of epochs
    and of its own methods, never in a step. ``name`` is the strategy's, ``job`` the whole
    cluster, ``cluster`` the tasks that work together: all but the evaluator, which is alone
    under any strategy.
    """

    @property
    def skips_together(self) -> bool:
        """Whether all tasks leave out the same updates."""
        return False

    def __init__(self, name: str, job: ClusterSpec, cluster: ClusterSpec, pairs: Pairs) -> None:
        self.name, self.job, self.cluster = name, job, cluster
        self.record_to: Path | None = None
        """The run folder; to be set before `Step.prepare`, in which some tasks end."""
        self._pairs = pairs

    @property
    def decides(self) -> bool:
        """Whether this task sees the whole training: it evaluates, and its callbacks run."""
        return True

    @property
    def joins(self) -> bool:
        """Whether the others train already, and will give this task all that they have."""
        return False

    @property
    @abstractmethod
    def traffic(self) -> Traffic:
        """What this task exchanged with the others so far."""

    def describe(self) -> dict[str, Any]:
        """What a run's settings should tell beside the strategy, as JSON."""
        return {}

    @contextmanager
    def during(self, purpose: str, optimizer: Optimizer | None = None) -> Generator[None]:
        """A block of calls for ``purpose``, which errors name.

        With ``optimizer`` the block is about the pair that was prepared with it: several
        trainers may share a strategy.
        """
        if optimizer is None:
            yield
        else:
            with self._pairs.using(optimizer):
                yield

    @abstractmethod
    def publish(self, work: Callable[[], T]) -> T:
        """What ``work`` returns, plain values, on every task; only those that decide do it."""

    @contextmanager
    def training(self) -> Generator[None]:
        """A block of `fit`, in which only tasks that decide run what users have given."""
        yield

    def tell_all(self, text: str) -> list[str]:
        """The ``text`` of every task, by rank; all call it. Where they do not meet: ``[text]``."""
        return [text]

    def compare_data(self, rows: Sequence[Tensor], which: int) -> None:
        """Refuse a task that was given other data; all call it where a training begins.

        Args:
            rows: Some of this task's, the same ones on each.
            which: A checksum of what has to be equal.

        Raises:
            UserError: If rows differ by more than rounding, or ``which`` does.
        """
        if self.joins:
            return
        total, norm = moments(rows)
        told = [text.split() for text in self.tell_all(f"{total!r} {norm!r} {which}")]
        others = drifted([(float(a), float(b)) for a, b, _ in told])
        for rank, is_other in enumerate(others):
            if is_other or told[rank][2] != told[0][2]:
                raise UserError(
                    f"{self.cluster.name_of(rank)} was given other data than "
                    f"{self.cluster.name_of(0)}",
                    "Each task takes its part of the whole, which all make alike: seed what draws "
                    "it, and divide nothing by ranks. Where each has data of its own: "
                    "sp.data.per_worker(...).",
                )

    def attempt(self, work: Callable[[], str]) -> list[str]:
        """What ``work`` returns on every task, by rank; all call it, and return together.

        Raises `UserError` on all of them if ``work`` does on one, which it names; an
        `UnwritableError` stays one.
        """
        return attempt_together(work, self.tell_all, self.cluster.name_of)

    @abstractmethod
    def agree_to_stop(self, asked: bool) -> bool:
        """Whether any task asked for an end of the training; all call it where they may end."""

    @contextmanager
    def deciding(self) -> Generator[None]:
        """A block at the end of an epoch, in which `agree_to_end` is waited for by the others."""
        yield

    def agree_to_end(self, asked: bool) -> bool:
        """The same after an epoch."""
        return self.agree_to_stop(asked)

    def watch(self, runs: bool, alone: bool = False) -> None:  # noqa: B027 - replicas compare
        """Refuse what a user's code writes between steps, where that would be lost.

        Args:
            runs: Whether such code runs.
            alone: Whether it is that of callbacks, which run where decisions are made.
        """

    def in_callbacks(self) -> AbstractContextManager[None]:
        """A block of callbacks between steps."""
        return nullcontext()

    def waits(self, data: float, seconds: float) -> dict[str, float]:
        """Parts of an epoch of so many seconds in which tasks waited: the means of those that meet.

        ``data`` is this task's part for data. All call it at the end of an epoch.
        """
        return {"data_wait_fraction": data}

    def synchronize(self) -> None:  # noqa: B027 - a single replica has nothing to do
        """Make equal what may differ between replicas: BatchNorm's statistics, and buffers."""

    def compare(self, order: int = 0) -> None:  # noqa: B027 - not all meet
        """Raise `UserError` that names the replicas whose parameters are not those of the others.

        ``order`` is a checksum of the examples of an epoch, in their order: it must be equal too.
        Where replicas do not meet, nothing is compared.
        """

    def compare_buffers(self) -> None:  # noqa: B027 - not all meet
        """Make equal the buffers that forward passes change; all tasks that meet call it.

        Raises:
            UserError: They differ, and training is deterministic.
        """

    def compare_order(self, drawn: int) -> None:  # noqa: B027 - not all meet
        """Raise `UserError` that names who reads other data; all tasks that meet call it.

        ``drawn`` is a checksum of the order of a pass, as of its batches.
        """

    def follow(self, schedule: LRScheduler | None, ahead: int = 0) -> None:  # noqa: B027 - few do
        """``schedule`` steps once per global step; None: nobody knows the options to come.

        It is ``ahead`` by so many steps, which it leaves out.

        For strategies whose updates are made by other tasks than those that have the schedule.
        """

    def publish_rates(self) -> None:  # noqa: B027 - where all decide, all decide the same
        """Give all tasks the learning rates that were chosen after an evaluation."""

    def failed(self, error: BaseException) -> None:  # noqa: B027 - most notice it anyway
        """``error`` ends a training on this task: tell others that would not notice."""

    def figures(self, own: Sequence[float]) -> dict[str, float]:
        """What an epoch came to beside loss and metrics, equal on all tasks, which all call this.

        ``own`` are this task's sums of the epoch: loss and its weight.
        """
        return {}

    def record(self, figures: dict[str, Any]) -> None:
        """Keep what this task did in the run folder, if there is one."""
        if self.record_to is not None:
            write_record(self.record_to, self.job.task, figures)


def attempt_together(
    work: Callable[[], str], tell_all: Callable[[str], list[str]], name_of: Callable[[int], str]
) -> list[str]:
    """As `Coordination.attempt`, of any tasks.

    Args:
        work: What each of them does.
        tell_all: Gives what all of them say, by rank.
        name_of: What an error calls one of them.
    """
    own: UserError | None = None
    try:
        mine = [work(), "", False]
    except UserError as error:
        own, mine = error, ["", str(error), isinstance(error, UnwritableError)]
    results = [json.loads(text) for text in tell_all(json.dumps(mine))]
    if own is not None:
        raise own
    for rank, (_, failure, unwritable) in enumerate(results):
        if failure:
            what, _, do = failure.partition("\n  ")
            kind = UnwritableError if unwritable else UserError
            raise kind(f"{name_of(rank)}: {what}", do)
    return [result for result, *_ in results]


class SynchronousCoordination(Coordination):
    """Replicas that meet in every step: all see the same figures, and so decide the same.

    One replica that is alone is the trivial case of them.
    """

    def __init__(
        self,
        name: str,
        job: ClusterSpec,
        cluster: ClusterSpec,
        pairs: Pairs,
        groups: Groups,
        outer: OuterLoop | None = None,
    ) -> None:
        super().__init__(name, job, cluster, pairs)
        self.groups, self._outer = groups, outer or EveryStep()
        self.agreements: Sequence[Agreement] = ()
        """What the parts of a step compare beside."""
        self.account: Account = Alike()
        """What is told of how models lie."""
        self._told: set[str] = set()  # buffers of which a warning has told

    @property
    def skips_together(self) -> bool:
        return self._outer.is_whole

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), **self._outer.describe(), **self.account.describe()}

    def figures(self, own: Sequence[float]) -> dict[str, float]:
        self.account.conclude()
        return self._outer.figures(own, self._pairs.in_use)

    @property
    def joins(self) -> bool:
        return self.groups.joins

    @property
    def traffic(self) -> Traffic:
        found = [self.account.traffic, *(group.traffic for group in self.groups.values())]
        each = {id(one): one for one in found}.values()
        return Traffic(
            sum(one.sent for one in each),
            sum(one.received for one in each),
            sum(one.waited for one in each),
            max(one.compression_error for one in each),
        )

    @contextmanager
    def during(self, purpose: str, optimizer: Optimizer | None = None) -> Generator[None]:
        call = self.groups.world.current_call  # that of all groups
        with call.during(purpose), super().during(purpose, optimizer):
            yield

    def publish(self, work: Callable[[], T]) -> T:
        return work()

    def tell_all(self, text: str) -> list[str]:
        return [each.decode() for each in self.groups.world.all_gather_bytes(text.encode())]

    def agree_to_stop(self, asked: bool) -> bool:
        return self._sum(float(asked)) > 0

    def waits(self, data: float, seconds: float) -> dict[str, float]:
        found = super().waits(self._mean(data), seconds)
        waited = self._outer.waits().items()
        return {**found, **{name: self._mean(each / seconds) for name, each in waited}}

    def synchronize(self) -> None:
        for pair in self._pairs.in_use:
            average_statistics(pair.model, self.groups.data)
        self.compare_buffers()
        if not self._outer.is_whole:
            for pair in self._pairs.in_use:
                own = shared_buffers(unwrap(pair.model), with_synchronized=False)
                self.settle_buffers(self.groups.data, own, is_strict=False)
        self._outer.show(self._pairs.in_use)

    def compare(self, order: int = 0) -> None:
        if self.groups.model.world_size > 1:
            self._together(partial(self._done, self._check_losses))
        # One after the other: who is refused in one group does not come to the next.
        self._together(lambda: self._compare(order))
        for each in self.agreements:
            self._together(partial(self._done, partial(each.compare, order)))
        self.compare_buffers()

    def settle(self) -> None:
        """Make what all have written into parameters their values; all call this."""
        for each in self.agreements:
            each.settle()

    def compare_buffers(self) -> None:
        self._together(partial(self._done, partial(self._settle_all, self.groups.replicas)))
        for each in self.agreements:
            self._together(partial(self._done, each.settle_buffers))

    def compare_order(self, drawn: int) -> None:
        """As `Coordination.compare_order`."""

        def compare() -> str:
            group = self._compared
            if group.world_size > 1:
                own = torch.tensor(drawn)
                check_orders(group, [int(each) for each in group.all_gather(own)])
            return ""

        self._together(compare)

    @property
    def _compared(self) -> Collective:
        """Who is to have the same as this task."""
        return self.groups.replicas if self._outer.is_apart else self.groups.data

    @staticmethod
    def _done(work: Callable[[], None]) -> str:
        work()
        return ""

    def _settle_all(self, group: Collective) -> None:
        """Make the buffers of all models alike in a group, or refuse those that are not."""
        for pair in self._pairs.all:
            model, is_strict = unwrap(pair.model), pair.randomness is not None
            own = shared_buffers(model)
            if pair.loss is not None:
                own |= {f"loss.{name}": each for name, each in shared_buffers(pair.loss).items()}
            self.settle_buffers(group, own, is_strict)
            if is_strict:
                refuse(group, unlike_caches(group, caches(model)))

    def settle_buffers(
        self, group: Collective, buffers: dict[str, Tensor], is_strict: bool
    ) -> None:
        """Refuse buffers that differ between the tasks of a group, or give all the first's.

        Args:
            group: Who all call it.
            buffers: By their names.
            is_strict: Whether to refuse them.

        Raises:
            UserError: They differ, and are to be equal.
        """
        others = unlike(group, buffers)
        if not others:
            return
        if is_strict:
            refuse(group, others)
        take_first(group, [buffers[name] for name in others])
        new = others.keys() - self._told
        self._told |= new
        if new and group.rank == 0:
            warn(
                "%s differed between replicas: forward passes change them, from the rows of each. "
                "All take the values of %s, here and at each end of an epoch, evaluation and "
                "checkpoint",
                in_words(new),
                group.names[0],
            )

    def _together(self, work: Callable[[], str]) -> None:
        """Do what the tasks of one data shard may raise on some: all of a model hear of it."""
        try:
            if self.groups.model.world_size > 1 or ALIKE in self.groups:
                self.attempt(work)
            else:
                work()
        except UserError:
            self._pairs.unseen = False  # it is said now
            raise

    def _check_losses(self) -> None:
        for pair in self._pairs.all:
            pair.losses.check()

    def _compare(self, order: int) -> str:
        self.settle()
        self.compare_in(self._compared, self.parameters(), order)
        for pair in self._pairs.all:
            pair.gradients.compared()
        self._pairs.batches.compared()
        return ""

    def compare_in(self, group: Collective, parameters: Sequence[nn.Parameter], order: int) -> None:
        """Refuse a task that has not the same as the others of a group.

        Args:
            group: Who all call it.
            parameters: Of each the same ones.
            order: A checksum of the examples so far, in their order.

        Raises:
            UserError: Which one it is, and what differs.
        """
        if group.world_size == 1:
            return
        learn = crc32(bytes(parameter.requires_grad for parameter in parameters))
        device = parameters[0].device if parameters else torch.device("cpu")
        mine = (self.checksum(parameters), rounding_id(device), order, learn)
        found = [each.tolist() for each in group.all_gather(torch.tensor(mine))]
        values, rounds, orders, flags = zip(*found, strict=True)
        check_orders(group, orders)
        if unlike := outliers(flags):
            raise different(group, unlike, *OTHERS_LEARN)
        _compare_values(group, parameters, values, rounds)

    def checksum(self, parameters: Sequence[nn.Parameter]) -> int:
        """A checksum of what must be equal on all replicas."""
        for each in self.agreements:
            if (found := each.checksum(parameters)) is not None:
                return found
        return checksum(parameters)

    def parameters(self) -> list[nn.Parameter]:
        """Those here of all prepared models."""
        models = [pair.model for pair in self._pairs.all]
        return [p for model in models for p in model.parameters() if not p.is_meta]

    def _mean(self, value: float) -> float:
        return self._sum(value) / self.groups.world.world_size

    def _sum(self, value: float) -> float:
        return self.groups.world.all_reduce(torch.tensor([value], dtype=torch.float64)).item()


def compare_values(group: Collective, tensors: Sequence[Tensor]) -> None:
    """Raise `UserError` unless all tasks of a group have the same values of these, all call it."""
    device = tensors[0].device if tensors else torch.device("cpu")
    found = group.all_gather(torch.tensor([checksum(tensors), rounding_id(device)]))
    values, rounds = zip(*(each.tolist() for each in found), strict=True)
    _compare_values(group, tensors, values, rounds)


def _compare_values(
    group: Collective, tensors: Sequence[Tensor], values: Sequence[int], rounds: Sequence[int]
) -> None:
    """As `compare_values`; these are all tasks' checksums, and how they round."""
    unlike = outliers(values)
    if unlike and len(set(rounds)) > 1:  # processors of several kinds: to rounding, then
        sums = group.all_gather(torch.tensor(moments(tensors), dtype=torch.float64))
        unlike = outliers(drifted([tuple(each.tolist()) for each in sums]))
    if unlike:
        raise different(group, unlike, *OTHER_VALUES)


def check_orders(group: Collective, orders: Sequence[int]) -> None:
    """Refuse a task that reads other examples, or in another order, than most.

    Args:
        group: Whose tasks.
        orders: A checksum of each one's examples.

    Raises:
        UserError: Which one it is.
    """
    if unlike := outliers(orders):
        raise different(
            group,
            unlike,
            "has trained on other examples, or in another order, than",
            "Give all replicas the same data, batch size and seed. A stream must give all of them "
            "all examples, whatever their rank: Spartito divides it. What each reads for itself is "
            "sp.data.per_worker(function).",
        )
