"""Equal copies on several machines."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from spartito.checkpoint.saved import Saved
from spartito.cluster.recovery import Recovery
from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective
from spartito.collectives.hierarchical import HierarchicalCollective
from spartito.collectives.process_group import ProcessGroupCollective
from spartito.collectives.tcp import SocketCollective
from spartito.data.batch import Batch
from spartito.engine.compression import Compress, Compression, choose, make_compression
from spartito.engine.ddp import OverlappedGradients
from spartito.engine.gradients import Gradients
from spartito.engine.optimizers import OptimizerLike, optimizer_parameters, unwrap
from spartito.engine.overlap import BUCKET, OVERLAPPED, StreamedGradients
from spartito.errors import UserError
from spartito.log import warn
from spartito.steps.outer import Outer
from spartito.steps.pair import Pair
from spartito.steps.synchronous import SynchronousStep


class MultiWorkerMirroredStep(SynchronousStep):
    """What a task does of each step under `MultiWorkerMirroredStrategy`."""

    name = "multi_worker_mirrored"
    _recovers = True

    def __init__(
        self,
        *,
        cluster: ClusterSpec | None = None,
        device: torch.device | str | None = None,
        sync_batchnorm: bool | None = None,
        timeout: float | None = None,
        communication: str = "auto",
        find_unused_parameters: bool | None = None,
        compress: Compress = None,
        bucket_bytes: int = BUCKET,
        flush_denormals: bool = True,
        recovery: Recovery | None = None,
        outer: Outer | None = None,
    ) -> None:
        super().__init__(
            cluster=cluster,
            device=device,
            sync_batchnorm=sync_batchnorm,
            timeout=timeout,
            communication=communication,
            find_unused_parameters=find_unused_parameters,
            flush_denormals=flush_denormals,
            recovery=recovery,
            outer=outer,
        )
        if compress is not None and self.recovery is not None:
            raise UserError(
                f"compress={compress!r} with recovery: what was left out of a lost task's "
                "gradients would be lost",
                "Leave one of them out.",
            )
        self._compress = choose(compress)
        if bucket_bytes < 1:
            raise UserError(f"bucket_bytes={bucket_bytes}", "At least 1; 1 MB hides most.")
        self._bucket_bytes = bucket_bytes
        self._compressions: list[Compression] = []

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
        if self._compress is not None:
            _check(self._compress, precision, deterministic)
        return super().prepare(
            model,
            optimizer,
            accumulate=accumulate,
            clip_norm=clip_norm,
            precision=precision,
            deterministic=deterministic,
            seed=seed,
        )

    def enter(self, batch: Batch) -> None:
        super().enter(batch)
        for compression in self._compressions:
            compression.epoch = batch.epoch

    def _state(self, pair: Pair) -> dict[str, Any]:
        state, found = super()._state(pair), self._compression()
        saved = {} if found is None else found.state_dict(*self._kept)
        return {**state, "compression": saved} if saved else state

    def _load(self, saved: Saved) -> None:
        super()._load(saved)
        if "optimizer" in saved and (found := self._compression()) is not None:
            state = saved.whole("compression") if "compression" in saved else {}
            found.load_state_dict(state, *self._kept)

    def _compression(self) -> Compression | None:
        """That of the pair that is meant, if its gradients leave in buckets."""
        gradients = self._pairs.only.gradients
        if isinstance(gradients, StreamedGradients | OverlappedGradients):
            return gradients.compression
        return None

    @property
    def _kept(self) -> tuple[dict[str, nn.Parameter], Collective, bool]:
        """What a compression needs to save and load what it keeps."""
        named = dict(unwrap(self._pairs.only.model).named_parameters())
        sends = isinstance(self._group, ProcessGroupCollective) or self.groups.lane.is_leader
        return named, self._group, sends

    def _gradients(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Gradients]:
        group, pairs = self._group, self._pairs
        if not isinstance(group, SocketCollective | HierarchicalCollective):
            by_group = isinstance(group, ProcessGroupCollective)
            if self._compress is not None and by_group and not self._overlaps:
                raise UserError(
                    f"compress={self._compress!r}: a process group sends gradients as they are",
                    "communication='auto' compresses, and 'ddp' does.",
                )
            if self._compress is not None and not by_group and self.is_chief:
                warn("compress=%r is for several machines: left out on one", self._compress)
            return super()._gradients(model, optimizer)
        nbytes = sum(p.numel() * p.itemsize for p in optimizer_parameters(optimizer))
        if self._compress is None and nbytes < OVERLAPPED * self._bucket_bytes:
            return super()._gradients(model, optimizer)
        return model, StreamedGradients(
            optimizer, group, self.groups.lane, lambda: len(pairs.all) == 1,
            self._new_compression(), self._bucket_bytes,
        )  # fmt: skip

    def _new_compression(self) -> Compression:
        self._compressions.append(make_compression(self._compress))
        return self._compressions[-1]


def _check(compress: Compress, precision: str, deterministic: bool) -> None:
    """Raise `UserError` for a training that cannot be compressed."""
    if deterministic:
        raise UserError(
            f"compress={compress!r} with deterministic=True, whose numbers are those of one device",
            "Leave one of them out: compressed gradients are rounded.",
        )
    if precision == "fp16" and compress != "bf16":
        raise UserError(
            f"compress={compress!r} with precision='fp16', whose loss scale changes",
            "What was left out has the scale of its step: choose precision='bf16'.",
        )
