"""Trainings by a strategy, and the same as a plain loop of torch, in the default mode."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spartito as sp
import spartito.engine.devices.precision
from spartito.engine.updates.optimizers import unwrap
from spartito.notes import logger
from tests.replicas import warns
from tests.strategies.changing_jobs import weights

EXAMPLES, BATCH, EPOCHS = 22, 8, 3  # the last batch of an epoch has 6 rows


def data(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = torch.randn(EXAMPLES, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return x.to(dtype), (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def build(case: dict[str, Any], dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    middle: nn.Module = case["norm"](9) if case.get("norm") else nn.Identity()
    bend = nn.ReLU() if "huge" in case else nn.Tanh()
    net = nn.Sequential(nn.Linear(5, 9), middle, bend, nn.Linear(9, 3)).to(dtype)
    return net, torch.optim.SGD(net.parameters(), 0.3, momentum=0.9)


def rate(step: int) -> float:
    return 1 / (1 + step)


def class_weight(case: dict[str, Any], dtype: torch.dtype) -> Tensor | None:
    return torch.tensor([1.0, 3.0, 0.25], dtype=dtype) if case.get("classes") else None


def by_torch(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """The weights and the mean loss of each epoch."""
    net, optimizer = build(case, dtype)
    factor = rate if case.get("schedule") else lambda step: 1.0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    loss = nn.CrossEntropyLoss(class_weight(case, dtype), reduction="sum")
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.get("precision", ""))
    scaler = torch.amp.GradScaler("cpu", enabled=case.get("precision") == "fp16")
    x, y = data(dtype)
    x[case.get("huge", 0)] *= case.get("times", 1)
    given = class_weight(case, dtype)
    losses = []
    for _ in range(EPOCHS):
        batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
        total = whole = 0.0
        for first in range(0, len(batches), case.get("accumulate", 1)):
            together = batches[first : first + case.get("accumulate", 1)]
            targets = torch.cat([target for _, target in together])
            weight = len(targets) if given is None else float(given[targets].sum())
            optimizer.zero_grad()
            for rows, target in together:
                with torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None):
                    value = loss(net(rows).to(dtype), target)
                scaler.scale(value / weight).backward()
                total += value.item()
            whole += weight
            scaler.unscale_(optimizer)
            if "clip_norm" in case:
                nn.utils.clip_grad_norm_(net.parameters(), case["clip_norm"])
            scaler.step(optimizer)
            scaler.update()
            if case.get("schedule"):
                schedule.step()
        losses.append(total / whole)
    return {"weights": weights(net), "loss": losses, "scale": scaler.get_scale()}


def by_strategy(
    name: str,
    options: dict[str, Any],
    case: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    folder: Path | None = None,
) -> dict[str, Any]:
    """The same by a trainer; with a ``folder`` another one goes on after a checkpoint."""
    spartito.engine.devices.precision._cpu_knows_bf16 = lambda: True  # or it would compute in fp32
    strategy = sp.strategy(name, **options)
    x, y = data(dtype)
    x[case.get("huge", 0)] *= case.get("times", 1)
    chain = sp.data.arrays(x, y).batch(BATCH)

    def trainer() -> sp.Trainer:
        net, optimizer = build(case, dtype)
        scheduled: Any = lambda made: torch.optim.lr_scheduler.LambdaLR(made, rate)  # noqa: E731
        return sp.Trainer(
            net,
            optimizer=optimizer,
            loss=nn.CrossEntropyLoss(class_weight(case, dtype)),
            strategy=strategy,
            scheduler=scheduled if case.get("schedule") else None,
            accumulate=case.get("accumulate", 1),
            clip_norm=case.get("clip_norm"),
            precision=case.get("precision", "fp32"),
        )

    first = made = trainer()
    losses: list[float] = []
    if folder is not None:
        first.fit(chain, epochs=2, verbose=0)
        first.save(folder / "saved")
        losses, made = list(first.history.history["loss"]), trainer()
        made.load(folder / "saved")
    made.fit(chain, epochs=EPOCHS, verbose=0)
    losses = (losses + made.history.history["loss"])[-EPOCHS:]
    state = strategy.state_dict() if first is made else {}
    strategy.close()
    scale = state.get("loss_scale", {}).get("scale", 1.0)
    return {"weights": weights(unwrap(made.model)), "loss": losses, "scale": scale}


def evaluation_refused(
    name: str, options: dict[str, Any], deterministic: bool, dropped: bool = False
) -> str:
    """What is said against evaluating a norm that has no running statistics.

    ``dropped``: not any more, after another evaluation.
    """
    strategy = sp.strategy(name, **options)
    x, y = data(torch.float64)
    norm = nn.BatchNorm1d(9, track_running_stats=dropped)
    net = nn.Sequential(nn.Linear(5, 9), norm).double()
    trainer = sp.Trainer(
        net, optimizer=torch.optim.SGD(net.parameters(), 0.1), loss=nn.CrossEntropyLoss(),
        strategy=strategy, deterministic=deterministic,
    )  # fmt: skip
    try:
        if dropped:
            trainer.evaluate(sp.data.arrays(x, y).batch(BATCH))
            norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
        trainer.evaluate(sp.data.arrays(x, y).batch(BATCH))
    except sp.UserError as error:
        return str(error)
    finally:
        strategy.close()
    return ""


@warns("BatchNorm1d '1' keeps no running statistics")
def evaluation_warned_of() -> bool:
    """Whether it is said where training is not deterministic."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        assert not evaluation_refused("mirrored", {}, deterministic=False)
    finally:
        logger.removeHandler(handler)
    return any("keeps no running statistics" in line for line in said)
