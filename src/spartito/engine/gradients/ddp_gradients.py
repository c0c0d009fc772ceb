"""Gradients that torch's DistributedDataParallel reduces while backward still runs.

The engine for GPUs, where NCCL's traffic hides behind the computation. On CPUs it runs on gloo.
The first update is made without it, and shows whether all parameters get a gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from spartito.accelerators import SideStream, kind_of
from spartito.collectives.collective import Piggybacked, add_piggybacked
from spartito.collectives.process_group import ProcessGroupCollective
from spartito.engine.devices.host_reads import Number
from spartito.engine.gradients.compression import Compression, Whole
from spartito.engine.gradients.gradient_edits import rewriting
from spartito.engine.gradients.gradient_sum import (
    PackedGradients,
    different_batches,
    quotient,
    scale_gradients,
)
from spartito.engine.updates.optimizers import Wrapper
from spartito.errors import UserError

_SETTLED = 3
"""Forward passes after which DDP's buckets are what they stay."""


class _Summing:
    """Sums flat gradients over ``group``, as ``compression`` sends them.

    Where a device has streams it runs on one of its own, beside the rest of backward.
    """

    def __init__(self, compression: Compression, group: ProcessGroupCollective) -> None:
        self._compression, self._group = compression, group
        self._side = SideStream()

    def begin(self, bucket: GradBucket) -> Future[Tensor]:
        """The mean, which DDP's backward passes want of each bucket that is complete."""
        device = bucket.buffer().device
        done: Future[Tensor] = Future(devices=[device] if kind_of(device).has_streams else None)
        with self._side.beside(device):
            self._average(bucket, done)
        return done

    def _average(self, bucket: GradBucket, done: Future[Tensor]) -> None:
        learn = cast(list[nn.Parameter], bucket.parameters())
        self._compression.summing(learn, self._group, bucket.buffer())()
        done.set_result(bucket.buffer().div_(self._group.world_size))


class Overlapped(Wrapper):
    """The user's ``module``, whose backward passes average gradients once `wrap` was called.

    Buffers stay each replica's own, as under every strategy.
    """

    def __init__(self, module: nn.Module, group: ProcessGroupCollective) -> None:
        super().__init__(module)
        self._group = group
        self._forwards = 0
        self._parallel: list[DistributedDataParallel] = []  # in a list: it is no submodule
        self.follow: Callable[[], Callable[[], None] | None] = lambda: None
        """What to call before a forward pass with gradients."""
        self.optimizer: Callable[[], Optimizer | None] = lambda: None
        """Whose gradients these are."""
        self.summing: _Summing | None = None
        """What makes the means; None leaves it to DDP."""
        self.finds_unused = False
        """Whether parameters may go without a gradient."""
        self.synchronizes = True
        """Whether the next backward pass averages; not so while batches accumulate."""
        self.averaged = False
        """Whether gradients that wait were averaged."""
        module.register_forward_hook(_as_dict)

    @property
    def is_wrapped(self) -> bool:
        """Whether backward passes average gradients."""
        return bool(self._parallel)

    def wrap(self, parameters: list[nn.Parameter], finds_unused: bool) -> None:
        """Have backward passes average the gradients of ``parameters``; all replicas call it."""
        kept = {id(parameter) for parameter in parameters}
        names = [name for name, p in self.module.named_parameters() if id(p) not in kept]
        self.module.__dict__["_ddp_params_and_buffers_to_ignore"] = names
        self.finds_unused, self._forwards = finds_unused, 0
        with warnings.catch_warnings():  # what is to replace broadcast_buffers does less
            warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
            self._parallel = [
                DistributedDataParallel(
                    self.module,
                    process_group=self._group.process_group,
                    broadcast_buffers=False,
                    init_sync=False,  # all begin with the same; BatchNorm's statistics may differ
                    find_unused_parameters=finds_unused,
                    gradient_as_bucket_view=True,
                )
            ]
        if (summing := self.summing) is not None:
            self._parallel[0].register_comm_hook(None, lambda state, bucket: summing.begin(bucket))

    def check_complete(self) -> None:
        """Raise `UserError` where a backward pass that averages left parameters out.

        Those have gradients all the same if batches before it used them: each replica's own.
        """
        try:
            for parallel in self._parallel:
                parallel._check_reducer_finalized()
        except RuntimeError as error:
            raise UserError(
                "parameters got no gradient in the last batch of this update, and all did in the "
                "first update",
                "Give the strategy find_unused_parameters=True: it costs a search per step.",
            ) from error

    def unwrap(self) -> None:
        """Leave gradients where they are again, and hold on to no process group."""
        for parallel in self._parallel:
            # Not DDP, which keeps the interpreter's lock, may be the last to hold the group.
            held = parallel.process_group
            vars(parallel).clear()  # at once: somebody may hold on to it
            del held
        self._parallel.clear()
        self.averaged = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the user's module."""
        follow = self.follow()
        if torch.is_grad_enabled() and follow is not None:
            follow()
        if not self._parallel or not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        parallel = self._parallel[0]
        self.averaged = self.averaged or self.synchronizes
        if not self.synchronizes:
            with parallel.no_sync():
                return parallel(*args, **kwargs)
        if self._forwards == _SETTLED:
            return parallel(*args, **kwargs)
        self._forwards += 1
        self._group.barrier()  # DDP agrees on its buckets in here, and moves what waits there
        with rewriting(self.optimizer()):
            return parallel(*args, **kwargs)


def _as_dict(model: nn.Module, given: Any, output: Any) -> Any:
    """DDP looks for what was used in tuples and dicts, not in other mappings."""
    return dict(output) if isinstance(output, Mapping) and not isinstance(output, dict) else output


class OverlappedGradients(PackedGradients):
    """Gradients that backward has averaged already; only the weights are left to agree on.

    The first update is made as in `PackedGradients`, and so is one after other parameters learn.
    Then DDP is given what learns, and looks for unused parameters in every step only where that
    update had some on any replica, or where ``finds_unused`` says so.
    """

    _collective: ProcessGroupCollective

    def __init__(
        self,
        optimizer: Optimizer,
        collective: ProcessGroupCollective,
        model: Overlapped,
        finds_unused: bool | None = None,
        compression: Compression | None = None,
    ) -> None:
        self._model, self._finds_unused = model, finds_unused
        if compression is not None and not isinstance(compression, Whole):
            model.summing = _Summing(compression, collective)
        model.follow, model.optimizer = WeakMethod(self._follow), ref(optimizer)
        self.shares = False
        """Whether other optimizers have some of these parameters."""
        self._is_measured = self._gave_up = False
        super().__init__(optimizer, collective, compression=compression)

    def begin(self, loss_divisor: float) -> float:
        """As `Gradients.begin`; backward begins once all replicas are about to."""
        found = super().begin(loss_divisor)
        if self._model.averaged and self._collective.is_gloo:
            self._collective.barrier()  # gloo would wait there for one that is at another call
        return found

    def before_forward(self, is_last: bool, epoch: int) -> None:
        """As `Gradients.before_forward`; batches that only accumulate exchange nothing."""
        super().before_forward(is_last, epoch)
        self._model.synchronizes = is_last

    def give_up_overlap(self) -> None:
        """Reduce after backward from now on: another optimizer has some of these parameters too.

        DDP has each gradient in memory of its own, so one of it can be in charge of a parameter.
        """
        self._gave_up = True
        if self._model.is_wrapped:
            self._plan()

    def _follow(self) -> None:
        """Give up DDP before a forward pass where other parameters learn than it was told."""
        if not self.counts:
            self.compression.undo()
            self._model.averaged = False
        self.refresh()
        if self._model.is_wrapped and not all(p.requires_grad for p in self._wrapped):
            self._plan()  # some were frozen: DDP would wait for their gradients

    def _plan(self) -> None:
        if self._model.averaged:
            raise UserError(
                "other parameters learn now than when this batch went through the model",
                "Freeze and unfreeze between two batches.",
            )
        self._model.unwrap()
        self._is_measured = False
        super()._plan()

    def discarding(self) -> AbstractContextManager[None]:
        """The others' gradients may come by this pass too."""
        return nullcontext() if self._model.averaged else super().discarding()

    def reduce(self, piggybacked: Piggybacked = ()) -> tuple[Number, Number, Piggybacked]:
        self.refresh()
        if not self._model.averaged:  # the first update, or one of batches that only accumulated
            if self._model.is_wrapped:
                super()._plan()
            weight, loss, others = super().reduce(piggybacked)
            self._is_measured = True
            return weight, loss, others
        self._model.check_complete()
        own = self._weighed
        came = self._collective.gather_scalars(
            (self.loss_divisor, own.weight, own.loss, *piggybacked)
        )
        if len({row[0] for row in came.rows}) > 1:
            raise different_batches(self.loss_divisor)
        _, weight, loss, *_ = came.sums
        world = self._collective.world_size
        scale_gradients(self.parameters, quotient(self.loss_divisor * world, weight))
        return weight, loss, add_piggybacked([row[3:] for row in came.rows])

    def clear(self) -> None:
        """As `Gradients.clear`; then DDP takes over, with what the first update has shown."""
        super().clear()
        self._model.averaged = False
        if not self._is_measured or self._gave_up:
            return
        if self._model.is_wrapped:
            self._packs = []
            return
        learn = [parameter for parameter in self.parameters if parameter.requires_grad]
        frozen = len(self.parameters) - len(learn)
        found = self.absent != frozen * self._collective.world_size
        finds = found if self._finds_unused is None else self._finds_unused
        if not learn or (finds and self.shares):  # DDP would count what others' passes have used
            return
        if _may_be_sparse(self._model, learn):  # it would wait for them: `reduce` refuses them
            return
        self._packs, self._wrapped = [], learn
        self._model.wrap(learn, finds)


def _may_be_sparse(model: nn.Module, learn: Sequence[nn.Parameter]) -> bool:
    """Whether modules that may have sparse gradients learn."""
    learns = set(map(id, learn))
    found = (module for module in model.modules() if getattr(module, "sparse", False) is True)
    return any(id(p) in learns for module in found for p in module.parameters(recurse=False))
