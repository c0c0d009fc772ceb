"""What `fit`, a loop written by hand and `evaluate` ask of a device, counted on a simulated one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import spartito as sp
from spartito.engine.devices.host_reads import kept_on_host, on_host
from tests import simulated

SIZE, CLASSES = 32, 10
SHORT, LONG = 20, 40
"""Steps of two epochs: what the longer one takes more is that of its steps alone."""


@dataclass(frozen=True)
class Case:
    """What is trained, by `fit` and by hand."""

    loss: nn.Module = field(default_factory=nn.CrossEntropyLoss)
    metrics: Sequence[str] = ("accuracy",)
    left_out: bool = False
    """Whether every eighth label is -100."""
    wide: bool = False
    """Whether a batch is too large to be read together with others."""
    has_momentum: bool = False
    """Whether the optimizer is SGD."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the trainer."""


def cases() -> dict[str, Case]:
    """By name."""
    weights = torch.linspace(1, 2, CLASSES, dtype=torch.float64)
    return {
        "classes": Case(),
        "left out": Case(left_out=True),
        "large batches": Case(wide=True),
        "numbers": Case(loss=nn.L1Loss(), metrics=()),
        "clipped": Case(options={"clip_norm": 0.1}, has_momentum=True),
        "weights of classes": Case(loss=nn.CrossEntropyLoss(weights)),
        "not finite": Case(options={"on_nonfinite": "skip"}),
    }


def main() -> None:
    """Print what each case costs, and what came of it, as JSON."""
    simulated.register()
    trained = {name: _trained(case) for name, case in cases().items()}
    print(json.dumps({"trained": trained, "evaluated": _evaluated(), "read": _read()}))


def _trained(case: Case) -> dict[str, Any]:
    """What a step costs, and the losses on both devices, by `fit` and by hand."""
    ours, by_hand = _per_step(case, _fit), _per_step(case, _loop)
    numbers = [run(case, SHORT, on)[0]() for run in (_fit, _loop) for on in ("cpu", simulated.NAME)]
    return {"fit": ours, "loop": by_hand, "numbers": numbers}


def _evaluated() -> dict[str, Any]:
    """What whole passes of two lengths cost, and the figures on both devices."""
    metrics = ["accuracy", "perplexity", "top_k_accuracy", "f1"]
    found, figures = [], []
    for device, steps in (("cpu", SHORT), (simulated.NAME, SHORT), (simulated.NAME, LONG)):
        case = Case(metrics=metrics, left_out=True)
        trainer, data = _trainer(case, device), sp.data.arrays(*_rows(case, steps)).batch(SIZE)
        trainer.evaluate(data)
        with simulated.counting() as counts:
            figures.append(trainer.evaluate(data))
        found.append(dict(counts))
    return {"costs": found[1:], "figures": figures[:2]}


def _read() -> dict[str, Any]:
    """What tensors of all kinds are in the host's memory, and what that costs."""
    made: list[Any] = [
        torch.tensor(1.5, dtype=torch.float64),
        torch.tensor([True, False, True]),
        torch.arange(5).view(1, 5),
        torch.empty(0, 3),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.rand(3, 4, generator=torch.Generator().manual_seed(0)).bfloat16().t(),
    ]
    tree = {"there": [tensor.to(simulated.NAME) for tensor in made], "here": (made[0], "a")}
    with simulated.counting() as counts:
        found = on_host(tree)
    pairs = zip(found["there"], made, strict=True)
    same = [one.is_cpu and one.dtype == two.dtype and one.equal(two) for one, two in pairs]
    weights = torch.ones(3, device=simulated.NAME)
    with simulated.counting() as kept:
        before = [kept_on_host(weights).sum().item() for _ in range(3)]
        weights.mul_(2)
        after = kept_on_host(weights).sum().item()
    return {
        "same": same, "beside": found["here"] == tree["here"], "copies": counts["copies to host"],
        "sums": [*before, after], "copies of weights": kept["copies to host"],
    }  # fmt: skip


Run = Callable[[Case, int, str], tuple[Callable[[], list[float]], Callable[[], object]]]
"""Of a case, its steps and a device: two epochs with their losses, and one epoch after those."""


def _per_step(case: Case, run: Run) -> dict[str, float]:
    """What each step costs, without what an epoch begins and ends with."""
    found = []
    for steps in (SHORT, LONG):
        first, again = run(case, steps, simulated.NAME)
        first()
        with simulated.counting() as counts:
            again()
        found.append(counts)
    short, long = found
    return {kind: (long[kind] - short[kind]) / (LONG - SHORT) for kind in long}


def _fit(
    case: Case, steps: int, device: str
) -> tuple[Callable[[], list[float]], Callable[[], object]]:
    trainer, data = _trainer(case, device), sp.data.arrays(*_rows(case, steps)).batch(SIZE)

    def first() -> list[float]:
        losses: list[float] = trainer.fit(data, epochs=2, verbose=False).history["loss"]
        return losses

    return first, lambda: trainer.fit(data, epochs=1, verbose=False)


def _loop(
    case: Case, steps: int, device: str
) -> tuple[Callable[[], list[float]], Callable[[], object]]:
    x, y = _rows(case, steps)
    model, loss = _model(case).to(device), case.loss.to(device)
    optimizer = _optimizer(case, model)
    weights = [_weight(case, y[first : first + SIZE]) for first in range(0, len(x), SIZE)]
    clip, looks = case.options.get("clip_norm"), "on_nonfinite" in case.options

    def epoch() -> float:
        (total, right), count = torch.zeros(2, dtype=torch.float64, device=device), 0.0
        for first, weight in zip(range(0, len(x), SIZE), weights, strict=True):
            rows = slice(first, first + SIZE)
            inputs, labels = x[rows].to(device), y[rows].to(device)
            output = model(inputs)
            value = loss(output, labels)
            value.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if not looks or _is_finite(model, value):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            total += value.detach() * weight
            count += weight
            if case.metrics:
                right += (output.detach().argmax(1) == labels).sum()
        return float(total.item() / count)

    return lambda: [epoch(), epoch()], epoch


def _is_finite(model: nn.Module, value: Tensor) -> bool:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    return math.isfinite(norm.item()) and math.isfinite(value.item())


def _weight(case: Case, labels: Tensor) -> float:
    """What torch has divided the loss of a batch by."""
    if isinstance(case.loss, nn.L1Loss):
        return float(len(labels))
    assert isinstance(case.loss, nn.CrossEntropyLoss)
    kept = labels[labels >= 0]
    return float(len(kept) if case.loss.weight is None else case.loss.weight.cpu()[kept].sum())


def _trainer(case: Case, device: str) -> sp.Trainer:
    model = _model(case)
    return sp.Trainer(
        model,
        optimizer=_optimizer(case, model),
        loss=case.loss.to(device),
        metrics=list(case.metrics),
        strategy=sp.OneDeviceStrategy(device=device),
        **case.options,
    )


def _model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    wide = 5000 if case.wide else 12
    layers = nn.Linear(wide, 16), nn.ReLU(), nn.Linear(16, CLASSES)
    return nn.Sequential(*layers).double()


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.has_momentum:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    return torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)


def _rows(case: Case, steps: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    count, wide = steps * SIZE, 5000 if case.wide else 12
    x = torch.randn(count, wide, generator=generator, dtype=torch.float64)
    if isinstance(case.loss, nn.L1Loss):
        return x, torch.randn(count, CLASSES, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (count,), generator=generator)
    if case.left_out:
        y[::8] = -100
    return x, y


if __name__ == "__main__":
    main()
