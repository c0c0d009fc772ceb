"""What the synchronous strategies share: equal copies that update together after every step."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Traffic
from spartito.collectives.rendezvous import connect
from spartito.data.batch import Batch
from spartito.data.dataset import Dataset, as_dataset
from spartito.data.loader import Loader
from spartito.data.source import PerWorker
from spartito.engine.batchnorm import average_statistics
from spartito.engine.checksum import checksum, drifted, moments, outliers, rounding_id
from spartito.engine.ddp import OverlappedGradients, overlap
from spartito.engine.gradients import Gradients, LocalGradients, PackedGradients
from spartito.engine.loss import LossFunction
from spartito.errors import UserError
from spartito.names import nearest
from spartito.strategies.base import Distributed, StepResult
from spartito.strategies.pair import Pair
from spartito.strategies.replica import ReplicaStrategy
from spartito.strategies.sharing import Placed, Together

T = TypeVar("T")


class SynchronousStrategy(ReplicaStrategy):
    """Every replica computes its share of the global batch; gradients are averaged exactly.

    ``cluster`` None asks the environment who takes part; ``device`` None takes this process's
    own GPU, else the CPU. ``sync_batchnorm`` makes BatchNorm one over the global batch; None
    does so when training is deterministic. ``timeout`` limits every wait, in seconds.
    ``communication`` "auto" takes the fastest way that all replicas share: on CPUs shared memory
    inside a machine and sockets between machines, on GPUs NCCL. "sockets" leaves shared memory
    out. "process_group" goes by gloo or NCCL in any case; "ddp" does too, and reduces while
    backward runs, as GPUs do.
    """

    def __init__(
        self,
        *,
        cluster: ClusterSpec | None = None,
        device: torch.device | str | None = None,
        sync_batchnorm: bool | None = None,
        timeout: float | None = None,
        communication: str = "auto",
    ) -> None:
        super().__init__(cluster, device, sync_batchnorm)
        self._collective = connect(self.cluster, self.device, timeout, communication)
        self._overlaps = self.num_replicas_in_sync > 1 and (
            communication == "ddp" or (communication == "auto" and self.device.type == "cuda")
        )
        # gloo aborts a process that ends with its group open. DDP stays until then: letting go of
        # it waits for the group's threads with the interpreter's lock, which one of them may want.
        if self._overlaps:
            atexit.register(self.close)
        else:
            weakref.finalize(self, self._collective.close)

    @property
    def traffic(self) -> Traffic:
        return self._collective.traffic

    def during(self, purpose: str) -> AbstractContextManager[None]:
        return self._collective.current_call.during(purpose)

    def step(self, batch: Batch, loss: LossFunction | None, *, stop: bool = False) -> StepResult:
        with self.during("step"):
            return super().step(batch, loss, stop=stop)

    def distribute(
        self, dataset: Any, *, seed: int | None = None, training: bool = True
    ) -> Distributed:
        replicas, order = self.num_replicas_in_sync, self._seed if seed is None else seed
        chain: Dataset = as_dataset(dataset)
        chain = self._divisible(chain, replicas) if training else chain
        loader = Loader(chain, (self.cluster.rank, replicas), order)
        uneven = isinstance(chain.source, PerWorker) and replicas > 1
        batches = Together(loader, self._collective) if uneven else loader
        return Placed(batches, self.device, self.enter, self._collective)

    def reduce(self, op: str, value: Tensor) -> Tensor:
        value = value.detach()
        with self.during("reduce"):
            if op == "sum":
                return self._collective.all_reduce(value.clone())
            if op == "mean":
                wide = value.double()
                both = torch.stack([wide.sum(), wide.new_tensor(float(wide.numel()))])
                self._collective.all_reduce(both)
                return both[0].div(both[1]).to(torch.promote_types(value.dtype, torch.float32))
            if op in ("max", "min"):
                parts = torch.stack(self._collective.all_gather(value))
                return parts.amax(0) if op == "max" else parts.amin(0)
        raise UserError(f"reduce({op!r})", nearest(op, ("sum", "mean", "max", "min")))

    def gather(self, rows: Tensor) -> Tensor:
        with self.during("gather"):
            return torch.cat(self._collective.all_gather_rows(rows))

    def synchronize(self) -> None:
        for pair in self._in_use:
            average_statistics(pair.model, self._collective)

    def lead(self, work: Callable[[], T]) -> T:
        return work()

    def compare_replicas(self, order: int = 0) -> None:
        if self.num_replicas_in_sync == 1:
            return
        learn = crc32(bytes(parameter.requires_grad for parameter in self._parameters()))
        mine = (self._checksum(), rounding_id(self.device), order, learn)
        values, rounds, orders, flags = zip(*self._gather_numbers(mine), strict=True)
        if unlike := outliers(orders):
            raise self._unlike(
                unlike,
                "has trained on other examples, or in another order, than",
                "Give all replicas the same data, batch size and seed.",
            )
        if unlike := outliers(flags):
            raise self._unlike(
                unlike,
                "has other parameters that learn than",
                "Freeze and unfreeze the same ones on every replica.",
            )
        unlike = outliers(values)
        if unlike and len(set(rounds)) > 1:  # processors of several kinds: to rounding, then
            found = self._collective.all_gather(
                torch.tensor(moments(self._parameters()), dtype=torch.float64)
            )
            unlike = outliers(drifted([tuple(each.tolist()) for each in found]))
        if unlike:
            raise self._unlike(
                unlike,
                "has other parameters than",
                "Something changed them on one replica alone, as a callback may. Go on from a "
                "checkpoint: then all start from the same.",
            )

    def tell_all(self, text: str) -> list[str]:
        return [told.decode() for told in self._collective.all_gather_bytes(text.encode())]

    def agree_to_stop(self, asked: bool) -> bool:
        return bool(self.reduce("max", torch.tensor([float(asked)])))

    def share_rates(self, optimizer: Optimizer) -> None:
        """Every replica has chosen the same."""

    def state_dict(self) -> dict[str, Any]:
        self.compare_replicas()
        return super().state_dict()

    def _parameters(self) -> list[nn.Parameter]:
        """Those of all prepared models. Buffers may differ: not all are synchronized."""
        return [parameter for pair in self._pairs for parameter in pair.model.parameters()]

    def _checksum(self) -> int:
        return checksum(self._parameters())

    def _gather_numbers(self, mine: Sequence[int]) -> list[list[int]]:
        return [each.tolist() for each in self._collective.all_gather(torch.tensor(mine))]

    def _unlike(self, ranks: Sequence[int], what: str, do: str) -> UserError:
        names = [self.cluster.name_of(rank) for rank in range(self.num_replicas_in_sync)]
        odd = " and ".join(names[rank] for rank in ranks)
        rest = " and ".join(name for rank, name in enumerate(names) if rank not in ranks)
        return UserError(f"the replicas have drifted apart: {odd} {what} {rest}", do)

    @property
    def _state_fraction(self) -> float:
        return 1.0

    def _share(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """The chief's values to all, as one message per dtype."""
        if self.num_replicas_in_sync == 1:
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor.detach() for tensor in tensors if tensor.dtype == dtype]
            with self.during("prepare"):
                flat = self._collective.broadcast(torch.cat([t.reshape(-1) for t in alike]))
            for tensor, part in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def _gradients(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Gradients]:
        if self.num_replicas_in_sync == 1:
            return model, LocalGradients(optimizer)
        if self._overlaps:
            gradients = OverlappedGradients(optimizer, self._collective, model)
            return overlap(model, self.device) if gradients.parameters else model, gradients
        return model, PackedGradients(optimizer, self._collective)

    def _update(self, pair: Pair, output: Any, examples: int, stop: bool) -> StepResult:
        randomness = pair.randomness
        drawn = () if randomness is None else randomness.piggybacked()
        with self.during("update"):
            weight, loss, stops, *drawn_by_all = pair.gradients.reduce((float(stop), *drawn))
        if randomness is not None:
            randomness.check(drawn_by_all)
        if weight:
            if pair.clip_norm is not None:
                pair.gradients.clip(pair.clip_norm)
            self._optimize(pair)
        pair.gradients.clear()
        pair.passes = 0
        return StepResult(output, examples, updates=1, loss=loss, weight=weight, stop=stops > 0)

    def _optimize(self, pair: Pair) -> None:
        """Let the optimizer use the reduced gradients."""
        pair.optimizer.step()
