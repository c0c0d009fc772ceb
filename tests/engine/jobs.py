"""What the tests of the engine run on every replica."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from spartito.collectives.collective import Collective
from spartito.data.batch import Batch
from spartito.engine.gradients.gradient_sum import Gradients, LocalGradients, PackedGradients
from spartito.engine.losses.loss import LossFunction, evaluate_loss, weigh
from spartito.engine.modules.batchnorm import (
    average_statistics,
    local_batchnorms,
    synchronize_batchnorm,
)
from spartito.engine.modules.buffers import unlike, unlike_caches
from spartito.engine.step_context import StepContext, within

NORMS: dict[int, type[nn.Module]] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
NORMS[5] = nn.BatchNorm3d


def context(collective: Collective, size: int, offsets: range, seed: int = 0) -> StepContext:
    return StepContext(collective, seed, 0, size, torch.arange(offsets.start, offsets.stop))


def normalize(
    collective: Collective,
    cuts: list[int],
    batches: list[Tensor],
    options: dict[str, Any],
    kind: type[nn.Module] | None = None,
) -> dict[str, Tensor]:
    """BatchNorm over ``batches`` whose rows are cut among the ranks; gradients and statistics."""
    kind = kind or NORMS[batches[0].dim()]
    norm: Any = kind(batches[0].shape[1], **options).to(batches[0].dtype)
    if norm.affine:
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 2, norm.num_features))
            norm.bias.copy_(torch.linspace(-1, 1, norm.num_features))
    synchronize_batchnorm(norm)
    assert kind in type(norm).__mro__
    assert not local_batchnorms(norm)
    if len(batches) % 2:  # copied, and sent to another process, it is what it was
        norm = copy.deepcopy(norm) if collective.rank else pickle.loads(pickle.dumps(norm))
    mine = range(cuts[collective.rank], cuts[collective.rank + 1])
    outputs, gradients = [], []
    for batch in batches:
        x = batch[mine.start : mine.stop].clone().requires_grad_()
        with within(context(collective, len(batch), mine)):
            y = norm(x)
            (y * weights(batch)[mine.start : mine.stop]).sum().backward()
        assert x.grad is not None
        outputs.append(y.detach())
        gradients.append(x.grad)
    result = {"output": torch.cat(outputs), "grad": torch.cat(gradients)}
    if norm.affine:  # the strategy sums these over the replicas
        result["weight"] = collective.all_reduce(norm.weight.grad)
        result["bias"] = collective.all_reduce(norm.bias.grad)
    if norm.track_running_stats:
        result |= {name: buffer.clone() for name, buffer in norm.named_buffers()}
    return result


def weights(batch: Tensor) -> Tensor:
    """Something to multiply outputs by, so that their gradients differ."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(batch.shape, generator=generator, dtype=torch.float64).to(batch.dtype)


def averaged(collective: Collective) -> list[Tensor]:
    """The running statistics of two BatchNorms after they were averaged."""
    first, last = nn.BatchNorm1d(2), nn.BatchNorm2d(3).double()
    model = nn.Sequential(first, nn.Linear(2, 2), last)
    norms: list[Any] = [first, last]
    for norm in norms:
        norm.running_mean.fill_(collective.rank)
        norm.running_var.fill_(10.0 * collective.rank)
    plain = nn.Linear(2, 2)
    average_statistics(plain, collective)
    average_statistics(model, collective)
    return [part for norm in norms for part in (norm.running_mean, norm.running_var)]


LOSSES: dict[str, Any] = {
    "mean": lambda: nn.CrossEntropyLoss(),
    "each": lambda: nn.CrossEntropyLoss(reduction="none"),
    "weight": lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.25]).double()),
    "ignore": lambda: nn.CrossEntropyLoss(ignore_index=1),
    "ignore default": lambda: nn.CrossEntropyLoss(),
    "weight and ignore": lambda: nn.CrossEntropyLoss(
        weight=torch.tensor([1.0, 3.0, 0.25]).double(), ignore_index=1, label_smoothing=0.1
    ),
    "smooth and ignore": lambda: nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.1),
    "nll": lambda: nn.NLLLoss(weight=torch.tensor([2.0, 1.0, 0.5]).double()),
}


def targets(loss: str) -> Tensor:
    target = torch.tensor([0, 1, 1, 2, 1, 0, 2, 1, 1, 0, 2])
    return torch.where(target == 1, -100, target) if loss == "ignore default" else target


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.LogSoftmax(1)).double()


def inputs() -> Tensor:
    return torch.randn(11, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def weighted(
    collective: Collective, cuts: list[list[int]], loss: str, clip: float | None, private: bool
) -> tuple[float, list[Tensor]]:
    """Loss and gradients of all rows, read in parts (one per entry of ``cuts``, accumulated)."""
    model = classifier()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, 0.1, fused=not private)
    gradients: Gradients = (
        PackedGradients(optimizer, collective)
        if collective.world_size > 1
        else LocalGradients(optimizer)
    )
    function: LossFunction = LOSSES[loss]()
    x, y = inputs(), targets(loss)
    for cut in cuts:
        mine = slice(cut[collective.rank], cut[collective.rank + 1])
        whole = cut[-1] - cut[0]
        offsets = torch.arange(mine.start - cut[0], mine.stop - cut[0])
        batch = Batch((x[mine], y[mine]), len(offsets), whole, offsets, 0, 0)
        loss_divisor = gradients.begin(float(whole))
        if batch.size:
            found = weigh(evaluate_loss(function, model(batch.x), batch), batch)
            scale = found.scale / loss_divisor if found.counts else 0.0
            found.value.backward(torch.full_like(found.value, scale))
            value = found.value.item() * found.scale if found.counts else 0.0
            gradients.add(value, found.weight)
    weight, total, (piggybacked,) = gradients.reduce((2.0,))
    assert piggybacked == 2.0 * collective.world_size
    if clip is not None:
        gradients.clip(clip, gradients.norm())
    result = [p.grad.clone() for p in parameters if p.grad is not None]
    gradients.clear()
    assert all(p.grad is None for p in parameters)
    return float(total / weight), result


Case = tuple[list[list[int]], str, float | None, bool]


def every_case(collective: Collective, cases: list[Case]) -> list[tuple[float, list[Tensor]]]:
    """`weighted` for one case after the other."""
    return [weighted(collective, *case) for case in cases]


def layouts(collective: Collective) -> list[Any]:
    """Reduced gradients of parameters of several dtypes and layouts, and what stays absent."""
    rank = collective.rank
    conv: Any = nn.Conv2d(3, 4, 3)
    conv = conv.to(memory_format=torch.channels_last)
    half = nn.Linear(2, 2).bfloat16()
    wide = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64).t())
    rare, never = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    parameters = [conv.weight, half.weight, wide, rare, never, frozen]
    gradients = PackedGradients(torch.optim.SGD(parameters, 0.1, fused=True), collective)
    gradients.begin(4.0)
    gradients.add(1.0, 2.0)
    base = torch.arange(4 * 3 * 3 * 3.0).view(4, 3, 3, 3)
    conv.weight.grad = (base * (rank + 1)).to(memory_format=torch.channels_last)
    half.weight.grad = torch.ones(2, 2).bfloat16()
    wide.grad = torch.arange(6.0, dtype=torch.float64).view(2, 3) * (rank + 1)
    if rank == 1:
        rare.grad = torch.tensor([1.0, -1.0])
    gradients.reduce()
    grads = [p.grad for p in parameters]
    assert conv.weight.grad.stride() == conv.weight.stride()
    assert wide.grad.stride() == wide.stride()
    return [None if grad is None else grad.clone() for grad in grads]


def sparse(collective: Collective) -> str:
    """The message that a sparse gradient brings."""
    table = nn.Embedding(5, 2, sparse=True)
    gradients = PackedGradients(torch.optim.SGD(table.parameters(), 0.1), collective)
    gradients.begin(1.0)
    table(torch.tensor([1, 2])).sum().backward()
    try:
        gradients.reduce()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def unlike_buffers(collective: Collective) -> list[dict[str, list[int]]]:
    """Which buffers differ: one on the last rank, one on none, and a cache of other sizes."""
    rank, last = collective.rank, collective.world_size - 1
    alike = {"same": torch.arange(3.0), "counted": torch.tensor(7)}
    buffers = {"odd": torch.full((3,), float(rank == last)), **alike}
    some: dict[str, Tensor | None] = {**buffers, "rows": torch.zeros(rank + 1), "none": None}
    caches: dict[str, Tensor | None] = {**alike}
    return [
        unlike(collective, buffers),
        unlike(collective, alike),
        unlike(collective, {}),
        unlike_caches(collective, some),
        unlike_caches(collective, caches),
        unlike_caches(collective, {}),
    ]
