"""Gradients that are summed over machines in buckets while backward still runs.

The order of the buckets is that in which rank 0's gradients became ready in its first update, as
in DistributedDataParallel (Li et al. 2020). All replicas send every bucket in this order, each as
soon as its gradients are there: at the latest in `StreamedGradients.reduce`. So nothing has to be
agreed on in a step, whatever a replica computes or leaves out.

Where sockets take the cores that backward computes on, nothing is hidden and the thread that sends
costs more than it saves. So both ways are tried at first (`OverlapTrial`), and the faster one is
taken: the sums are the same, bit by bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from spartito.collectives.collective import Collective, Piggybacked
from spartito.collectives.lane import Lane
from spartito.collectives.standing_sum import Work
from spartito.engine.devices.host_reads import Number
from spartito.engine.gradients.compression import Compression
from spartito.engine.gradients.gradient_sum import (
    PackedGradients,
    different_batches,
    refuse_sparse,
    views,
)
from spartito.engine.gradients.overlap_trial import OverlapTrial
from spartito.fingerprints import checksum

BUCKET = 1 << 20
"""Bytes of gradients from which on a bucket is sent: hides most, as exchanges go."""

OVERLAPPED = 3
"""Buckets from which on the overlap is worth its exchanges."""

_CHANGED = 2.0**32  # added to the count of absent gradients, which is smaller


def cut(
    order: Iterable[int], nbytes: Sequence[int], kinds: Sequence[Hashable], limit: int
) -> list[list[int]]:
    """Divide tensors into buckets of one kind each.

    Args:
        order: The tensors' numbers as they become ready.
        nbytes: The size of each.
        kinds: What tensors of one bucket have in common, of each.
        limit: Bytes from which on a bucket is complete.

    Returns:
        The numbers in each bucket, in ``order``; buckets come as they are complete, then the rest.
    """
    complete: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    for number in order:
        bucket = filling.setdefault(kinds[number], [])
        bucket.append(number)
        if sum(nbytes[member] for member in bucket) >= limit:
            complete.append(filling.pop(kinds[number]))
    return complete + list(filling.values())


class _Bucket:
    """Parameters whose gradients are sent as one flat tensor."""

    def __init__(
        self, members: Sequence[int], parameters: Sequence[nn.Parameter], lane: Lane,
        compression: Compression,
    ) -> None:  # fmt: skip
        self.members = members
        self.parameters = [parameters[member] for member in members]
        first = self.parameters[0]
        numel = sum(parameter.numel() for parameter in self.parameters)
        self.sum = lane.standing_sum(
            numel, first.dtype, partial(compression.summing, self.parameters)
        )
        self._inputs = views(self.sum.input, self.parameters)
        self.outputs = views(self.sum.output, self.parameters)
        self._sent: list[tuple[Tensor | None, int]] = []
        self._checksum: int | None = None

    def fill(self, checked: bool) -> Work:
        """Take the gradients as they are now; returns what sums them.

        ``checked``: they may change without a trace in their versions, as through ``.data``.
        """
        grads = [parameter.grad for parameter in self.parameters]
        present = [grad for grad in grads if grad is not None]
        if len(present) < len(grads):
            self.sum.input.zero_()
        if present:
            pairs = zip(grads, self._inputs, strict=True)
            torch._foreach_copy_([view for grad, view in pairs if grad is not None], present)
        self._sent = [(grad, 0 if grad is None else grad._version) for grad in grads]
        self._checksum = checksum(present) if checked else None
        return self.sum.run

    @property
    def is_stale(self) -> bool:
        """Whether the gradients are others now than those that were sent."""
        for parameter, (grad, version) in zip(self.parameters, self._sent, strict=True):
            if parameter.grad is not grad or (grad is not None and grad._version != version):
                return True
        present = [grad for grad, _ in self._sent if grad is not None]
        return self._checksum is not None and checksum(present) != self._checksum

    def forget(self) -> None:
        """Hold on to no gradient."""
        self._sent = []


class StreamedGradients(PackedGradients):
    """Gradients that leave in buckets, by a `Lane`, as soon as backward has them.

    ``.grad`` stays this replica's own until `reduce`. What was sent and is changed afterwards, by
    one more backward pass or by the user, is noticed there, and all replicas send everything anew.

    Args:
        optimizer: Whose parameters' gradients.
        collective: The group for everything else.
        lane: Sends the buckets.
        alone: Whether no other optimizer's gradients can come in between.
        compression: How buckets are sent; None: as they are.
        bucket_bytes: From so many bytes of gradients on a bucket is sent.
        trial: Finds out whether buckets should leave beside backward; None: they do.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        collective: Collective,
        lane: Lane,
        alone: Callable[[], bool],
        compression: Compression | None = None,
        bucket_bytes: int = BUCKET,
        trial: OverlapTrial | None = None,
    ) -> None:
        self._bucket_bytes, self._trial = bucket_bytes, trial
        self._began: float | None = None  # the first backward pass of this update
        self._lane, self._alone = lane, alone
        self._hooks: list[RemovableHandle] = []
        self._buckets: list[_Bucket] = []
        self._next = 0  # the bucket that is sent next
        self._is_last = self._listens = True
        self._may_leave = False  # buckets before `reduce`, on some replica
        self._is_early = False  # they do so here, in this backward pass
        self._is_dropped = False  # what was sent belongs to no update
        self._passes = 0  # of the user's own loop, in the last update
        self._rest = self._rests = 0  # updates without overlap; how many after the last change
        self.overlapped = 0
        """Buckets that left while backward still ran, so far."""
        self._scalars = collective.reducer(0, torch.float64, torch.device("cpu"))
        super().__init__(optimizer, collective, compression=compression)

    def leave(self) -> None:
        """As `Gradients.leave`; backward tells nothing any more."""
        for hook in self._hooks:
            hook.remove()

    def _plan(self) -> None:
        self._settle()
        self.leave()
        here, count = ref(self), len(self.parameters)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_tell, here, number))
            for number, parameter in enumerate(self.parameters)
            if parameter.requires_grad
        ]
        self._checked = self._is_ordered = False
        if self._trial is not None:
            self._trial = OverlapTrial()  # all replicas are here, and other sums are to come
        self._arrivals: list[int] = []  # in this backward pass
        self._parts, self._expected = [0] * count, [0] * count
        self._order: Sequence[int] = range(count)[::-1]
        self._cut()

    def _cut(self) -> None:
        """Make the buckets anew; all replicas call this, with nothing under way."""
        parameters, order = self.parameters, self._order
        self._buckets = []  # their memory is free for the new ones
        nbytes = [parameter.numel() * parameter.itemsize for parameter in parameters]
        kinds = [parameter.dtype for parameter in parameters]
        parts = self._overlaps and sum(nbytes) >= OVERLAPPED * self._bucket_bytes
        limit = self._bucket_bytes if parts else sum(nbytes) + 1
        self._buckets = [
            _Bucket(members, parameters, self._lane, self.compression)
            for members in cut(order, nbytes, kinds, limit)
        ]
        self._bucket_of = {m: n for n, bucket in enumerate(self._buckets) for m in bucket.members}

    @property
    def _overlaps(self) -> bool:
        return self._trial is None or self._trial.overlaps

    def before_forward(self, is_last: bool, epoch: int) -> None:
        """As `Gradients.before_forward`; batches that only accumulate send nothing."""
        super().before_forward(is_last, epoch)
        self._is_last = is_last

    def begin(self, loss_divisor: float) -> float:
        """As `Gradients.begin`; gradients of an update's last backward pass leave in it."""
        found = super().begin(loss_divisor)
        self._arrivals, self._parts = [], [0] * len(self.parameters)
        due = self._is_ordered and self._is_last and self.backward_calls >= self._passes
        if self._began is None:
            self._began = time.perf_counter()
        due = due and self._overlaps and not self._rest
        may_leave = due and len(self._buckets) >= OVERLAPPED and self._alone()
        self._may_leave = self._may_leave or may_leave
        self._is_early = may_leave and any(self._expected)
        self._missing = [0] * len(self._buckets)
        for number, bucket in self._bucket_of.items():
            self._missing[bucket] += self._expected[number] > 0
        return found

    def discarding(self) -> AbstractContextManager[None]:
        """As `Gradients.discarding`; nothing of that pass is sent."""
        return self._unheard(super().discarding())

    @contextmanager
    def _unheard(self, inner: AbstractContextManager[None]) -> Iterator[None]:
        self._listens = False
        try:
            with inner:
                yield
        finally:
            self._listens = True

    def arrived(self, number: int) -> None:
        """Take note that backward has added to the gradient of the parameter ``number``."""
        if not self._listens:
            return
        self._parts[number] += 1
        if self._parts[number] == 1:
            self._arrivals.append(number)
        if not self._is_early or self._parts[number] != self._expected[number]:
            return
        self._missing[self._bucket_of[number]] -= 1
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._lane.begin(self._filled())

    def _filled(self) -> Work:
        """The next bucket, ready to go."""
        self._next += 1
        try:
            return self._buckets[self._next - 1].fill(checked=self.backward_calls > 0)
        except RuntimeError:
            refuse_sparse(self.parameters)
            raise

    def reduce(self, piggybacked: Piggybacked = ()) -> tuple[Number, Number, Piggybacked]:
        packed = self._learning()
        sent = self._buckets[: self._next]
        changed = self._is_dropped or any(bucket.is_stale for bucket in sent)
        absent = sum(parameter.grad is None for parameter in packed) if self.counts else 0
        weight = float(self._collective.rank == 0) if self.normalized else float(self.weight)
        noticed = absent + changed * _CHANGED
        brought = (weight, float(self.loss), *piggybacked, noticed, self.loss_divisor)
        self.overlapped += self._next
        early = self._next > 0
        if early:
            self._flush()
        total = self._scalars.reduce(brought, self.loss_divisor)
        if total[-1] != self.loss_divisor * self._collective.world_size:
            raise different_batches(self.loss_divisor)
        while self._next < len(self._buckets):  # a thread of their own would hide nothing now
            self._lane.run(self._filled())
        self._lane.wait()
        changes, self.absent = divmod(total[-2], _CHANGED)
        if changes:
            self._again()
        self._lane.count_for(self._collective)
        unused = self._unused(packed) if self.absent else frozenset()
        self._give_back(total[0], unused)
        self._learn(bool(changes), early)
        return total[0], total[1], total[2:-2]

    def _flush(self) -> None:
        """Send what was not."""
        while self._next < len(self._buckets):
            self._lane.begin(self._filled())

    def _again(self) -> None:
        """Send all of it anew."""
        self.compression.undo()
        self._next = 0
        self._flush()
        self._lane.wait()

    def _settle(self) -> None:
        """Complete what was sent and is no longer wanted: others may wait for it."""
        if self._may_leave:
            self._flush()
            self._lane.wait()
            self.compression.undo()
        self._next, self._may_leave, self._began = 0, False, None

    def _give_back(self, weight: float, unused: frozenset[int]) -> None:
        """Let ``.grad`` be the mean, None for what is ``unused`` everywhere."""
        if weight and weight != self.loss_divisor:
            torch._foreach_mul_([b.sum.output for b in self._buckets], self.loss_divisor / weight)
        for bucket in self._buckets:
            for parameter, output in zip(bucket.parameters, bucket.outputs, strict=True):
                parameter.grad = None if id(parameter) in unused else output

    def _learn(self, changed: bool, early: bool) -> None:
        """Do in the next update what fits the one that is complete."""
        tried = self._trial is not None and self._is_ordered and self._try(changed, early)
        self._began = None
        self._passes = self.backward_calls
        self._rest = max(0, self._rest - 1)
        if changed:  # the more often, the longer without overlap
            self._rest = self._rests = 2 * self._rests + 1
        if self._arrivals:
            self._expected = self._parts
        for bucket in self._buckets:
            bucket.forget()
        self._next, self._may_leave, self._is_dropped = 0, False, False
        if tried:
            self._cut()
        if not self._is_ordered and self._buckets:
            self._reorder()

    def _try(self, changed: bool, early: bool) -> bool:
        """Count an update of a trial; whether the next one goes the other way."""
        assert self._trial is not None
        took = None if changed or self._began is None else time.perf_counter() - self._began
        before = self._trial.overlaps
        if self._trial.count(took, early):
            found = self._collective.broadcast(torch.tensor([self._trial.found]))
            self._trial.settle(bool(found[0]))
        return self._trial.overlaps != before

    def _reorder(self) -> None:
        """Take over the order in which gradients came on rank 0, if some came there."""
        here = range(len(self.parameters))
        order = [*self._arrivals, *sorted(set(here) - set(self._arrivals), reverse=True)]
        first = torch.tensor(order if self._arrivals else [-1] * len(order))
        if self._collective.broadcast(first)[0] >= 0:
            self._is_ordered, self._order = True, first.tolist()
            self._cut()

    def clear(self) -> None:
        super().clear()
        self._is_dropped = self._may_leave

    def _unsend(self) -> None:
        if not self._may_leave:  # else some may be under way
            super()._unsend()


def _tell(gradients: ref[StreamedGradients], number: int, _: Tensor) -> None:
    """A hook: no parameter keeps the gradients of a strategy that is gone."""
    if (found := gradients()) is not None:
        found.arrived(number)
