"""What the synchronous strategies share: equal copies that update together after every step."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.cluster.spec import ClusterSpec
from spartito.collectives.collective import Collective
from spartito.collectives.meeting import connect
from spartito.data.batch import Batch
from spartito.data.dataset import as_dataset
from spartito.data.loader import Loader
from spartito.data.source import PerWorker
from spartito.engine.batchnorm import (
    average_statistics,
    has_synchronized,
    synchronize_batchnorm,
)
from spartito.engine.context import StepContext, enter
from spartito.engine.ddp import OverlappedGradients, overlap
from spartito.engine.dropout import globalize_dropout
from spartito.engine.gradients import Gradients, LocalGradients, PackedGradients
from spartito.engine.loss import LossFunction, evaluate_loss, forward, in_dtype, weigh
from spartito.engine.optimizers import (
    NoOptimizer,
    OptimizerLike,
    check_optimizer,
    fuse,
    load_named_state,
    make_optimizer,
    named_state,
    optimizer_parameters,
    plain,
)
from spartito.engine.precision import autocast, choose_precision
from spartito.errors import UserError
from spartito.names import nearest
from spartito.strategies.base import Distributed, StepResult, Strategy
from spartito.strategies.sharing import Placed, Together


@dataclass
class _Pair:
    """A prepared model, its optimizer, and what an update of it has to do."""

    model: nn.Module
    optimizer: Optimizer
    gradients: Gradients
    accumulate: int
    clip_norm: float | None
    precision: str
    waits: bool  # a forward pass waits for the other replicas: even an empty batch runs one
    dtype: torch.dtype | None  # what floating data is cast to: that of the parameters
    passes: int = 0


class SynchronousStrategy(Strategy):
    """Every replica computes its share of the global batch; gradients are averaged exactly.

    ``cluster`` None asks the environment who takes part; ``device`` None takes this process's
    own GPU, else the CPU. ``sync_batchnorm`` makes BatchNorm one over the global batch; None
    does so when training is deterministic. ``timeout`` limits every wait, in seconds.
    ``communication`` "auto" takes the fastest way that all replicas share. "process_group" goes
    by gloo or NCCL in any case; "ddp" does too, and reduces while backward runs, as GPUs do.
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
        super().__init__(cluster)
        self.device = _own_device(self.cluster) if device is None else _named_device(device)
        self._sync_batchnorm = sync_batchnorm
        self._collective: Collective = connect(self.cluster, self.device, timeout, communication)
        self._overlaps = self.cluster.num_replicas > 1 and (
            communication == "ddp" or (communication == "auto" and self.device.type == "cuda")
        )
        self._pairs: list[_Pair] = []
        self._seed = 0
        self._needs_context = False
        _share_cores(self.cluster)
        atexit.register(self.close)  # gloo aborts a process that ends with its group open

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
        model.to(self.device)
        made = make_optimizer(optimizer, model)
        check_optimizer(made, model, self.num_replicas_in_sync)
        fuse(made)
        synchronized = deterministic if self._sync_batchnorm is None else self._sync_batchnorm
        if synchronized:
            synchronize_batchnorm(model)
        if deterministic:
            globalize_dropout(model)
        self._seed = seed
        self._needs_context = self._needs_context or synchronized or deterministic
        self._broadcast([*model.parameters(), *model.buffers()])
        waits = self.num_replicas_in_sync > 1 and (has_synchronized(model) or self._overlaps)
        gradients = self._gradients(made)
        if self._overlaps and optimizer_parameters(made):
            model = overlap(model, self.device)
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        pair = _Pair(model, made, gradients, accumulate, clip_norm, precision, waits, dtype)
        self._pairs.append(pair)
        return model, made

    def distribute(self, dataset: Any, *, seed: int | None = None) -> Distributed:
        chain = as_dataset(dataset)
        loader = Loader(
            chain,
            self.cluster.rank,
            self.num_replicas_in_sync,
            self._seed if seed is None else seed,
        )
        if isinstance(chain.source, PerWorker) and self.num_replicas_in_sync > 1:
            return Placed(Together(loader, self._collective), self.device, self.enter)
        return Placed(loader, self.device, self.enter)

    def step(self, batch: Batch, loss: LossFunction | None, *, stop: bool = False) -> StepResult:
        pair = self._only_pair()
        output = None
        if batch.size or pair.waits:
            self.enter(batch)
            batch = in_dtype(batch, pair.dtype)
            with autocast(pair.precision, self.device):
                output = forward(pair.model, batch.data, loss is not None)
                answer = evaluate_loss(loss, output, batch)
            self._backward([pair], answer, batch)
        else:
            pair.gradients.begin(float(batch.global_size))
        pair.passes += 1
        if pair.passes < pair.accumulate:
            return StepResult(0.0, 0.0, output, updated=False, stop=False)
        return self._update(pair, output, stop)

    def flush(self) -> StepResult | None:
        pair = self._only_pair()
        return self._update(pair, None, False) if pair.passes else None

    def evaluate(self, batch: Batch, loss: LossFunction | None) -> tuple[float, float, Any]:
        if not batch.size:
            return 0.0, 0.0, None
        pair = self._only_pair()
        batch = in_dtype(batch, pair.dtype)
        with torch.no_grad(), autocast(pair.precision, self.device):
            output = forward(pair.model, batch.data, loss is not None)
            found = weigh(evaluate_loss(loss, output, batch), batch)
        return found.value.item() * found.scale, found.weight, output

    def predict(self, batch: Batch, has_loss: bool) -> Any:
        pair = self._only_pair()
        data = in_dtype(batch, pair.dtype).data
        with torch.no_grad(), autocast(pair.precision, self.device):
            output = forward(pair.model, data, has_loss)
        if not has_loss and isinstance(output, dict):
            return {name: part for name, part in output.items() if name != "loss"}
        return output

    def backward(self, losses: Any, batch: Batch) -> None:
        self._backward(self._pairs, losses, batch)

    def update(self, optimizer: Optimizer) -> None:
        for pair in self._pairs:
            if pair.optimizer is optimizer:
                self._update(pair, None, False)
                return
        raise UserError(
            f"update({type(optimizer).__name__}) of an optimizer that was not prepared",
            "Use the one that strategy.prepare answered.",
        )

    def reduce(self, op: str, value: Tensor) -> Tensor:
        value = value.detach()
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
        return torch.cat(self._collective.all_gather_rows(rows))

    def synchronize(self) -> None:
        for pair in self._pairs:
            average_statistics(pair.model, self._collective)

    def state(self) -> dict[str, Any]:
        self.synchronize()
        pair = self._only_pair()
        model = plain(pair.model)
        return {
            "model": dict(model.state_dict()),
            "optimizer": named_state(model, pair.optimizer),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        pair = self._only_pair()
        try:
            plain(pair.model).load_state_dict(state["model"])
        except RuntimeError as error:
            raise UserError(
                f"the checkpoint does not fit the model: {error}",
                "Build the model as it was built when the checkpoint was written.",
            ) from error
        if "optimizer" in state and not isinstance(pair.optimizer, NoOptimizer):
            load_named_state(plain(pair.model), pair.optimizer, state["optimizer"])

    def close(self) -> None:
        enter(None)
        self._collective.close()

    def enter(self, batch: Batch) -> None:
        """Tell the modules that look beyond their replica which batch comes next."""
        if self._needs_context:
            step = batch.epoch << 32 | batch.step
            enter(StepContext(self._collective, self._seed, step, batch.global_size, batch.places))

    def _gradients(self, optimizer: Optimizer) -> Gradients:
        parameters = optimizer_parameters(optimizer)
        if self.num_replicas_in_sync == 1:
            return LocalGradients(parameters)
        if self._overlaps:
            return OverlappedGradients(parameters, self._collective, self.device)
        fused = all(group.get("fused") for group in optimizer.param_groups)
        return PackedGradients(parameters, self._collective, private=not fused)

    def _backward(self, pairs: Sequence[_Pair], answer: Any, batch: Batch) -> None:
        found = weigh(answer, batch)
        if not found.value.requires_grad:
            raise UserError(
                "the loss has no gradient: no parameter that learns leads to it",
                "Compute it from the model's output by differentiable functions of torch, "
                "and leave requires_grad on where it is to learn.",
            )
        units = [pair.gradients.begin(float(batch.global_size)) for pair in pairs]
        if len(set(units)) != 1:
            raise UserError(
                f"one backward pass for optimizers in the middle of batches of {units}",
                "Update every optimizer, or clear it by zero_grad(), before the next batch.",
            )
        scale = found.scale * pairs[0].gradients.replicas / units[0] if found.weight else 0.0
        found.value.backward(torch.full_like(found.value, scale))
        loss = found.value.detach().item() * found.scale if found.weight else 0.0
        for pair in pairs:
            pair.gradients.add(loss, found.weight)

    def _update(self, pair: _Pair, output: Any, stop: bool) -> StepResult:
        weight, loss, stops = pair.gradients.reduce((float(stop),))
        if weight:
            if pair.clip_norm is not None:
                pair.gradients.clip(pair.clip_norm)
            pair.optimizer.step()
        pair.gradients.clear()
        pair.passes = 0
        return StepResult(loss, weight, output, updated=True, stop=stops > 0)

    def _only_pair(self) -> _Pair:
        if len(self._pairs) != 1:
            raise UserError(
                f"step() with {len(self._pairs)} prepared models",
                "Prepare one model for it; with several, use backward() and update().",
            )
        return self._pairs[0]

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        """The chief's values to all, as one message per dtype."""
        if self.num_replicas_in_sync == 1:
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor.detach() for tensor in tensors if tensor.dtype == dtype]
            flat = self._collective.broadcast(torch.cat([tensor.reshape(-1) for tensor in alike]))
            for tensor, part in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
                tensor.copy_(part.view(tensor.shape))


def _own_device(cluster: ClusterSpec) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", cluster.local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def _named_device(name: torch.device | str) -> torch.device:
    try:
        return torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"device={name!r} is none of torch's", "As 'cpu' or 'cuda:0'.") from error


def _share_cores(cluster: ClusterSpec) -> None:
    """Divide the cores among the replicas of this machine, unless the user has done so."""
    if cluster.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        from spartito.device import available_cores

        torch.set_num_threads(max(1, available_cores() // cluster.local_size))
