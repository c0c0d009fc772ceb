"""A LightningModule as a model: its steps, its optimizer and its figures, without Lightning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from spartito.cluster.spec import ClusterSpec
from spartito.engine.logged import log
from spartito.engine.losses.loss import describe, own_loss
from spartito.engine.updates.optimizers import OWN_LOOP
from spartito.errors import UserError
from spartito.notes import warn
from spartito.training.fitting.custom_step import StepFunction

NAME = "LightningModule"
VALIDATIONS = ("val_", "val/")
LOSSES = ("loss", "val_loss", "val/loss")
HOOKS = (
    "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_fit_end",
    "on_fit_start", "on_train_batch_end", "on_train_batch_start", "on_train_end",
    "on_train_epoch_end", "on_train_epoch_start", "on_train_start", "on_validation_epoch_end",
    "on_validation_epoch_start", "configure_gradient_clipping", "lr_scheduler_step",
    "optimizer_step", "backward", "configure_callbacks", "configure_model", "setup",
    "on_after_batch_transfer", "on_before_batch_transfer", "transfer_batch_to_device",
    "on_before_backward", "on_load_checkpoint", "on_save_checkpoint", "on_validation_batch_end",
    "on_validation_batch_start", "on_validation_end", "on_validation_start",
    "optimizer_zero_grad",
)  # fmt: skip
"""Methods of a LightningModule that Lightning's own trainer calls, and this one does not."""


@dataclass(frozen=True)
class Parts:
    """What a LightningModule brings.

    Args:
        train_step: Its ``training_step``.
        eval_step: Its ``validation_step``, else its ``training_step``.
        optimizer: Of its ``configure_optimizers``.
        scheduler: Likewise, if there is one.
        interval: What that is stepped with: "step" or "epoch".
        monitor: What it watches.
    """

    train_step: StepFunction
    eval_step: StepFunction
    optimizer: Optimizer | None
    scheduler: Any
    interval: str
    monitor: str | None


def is_lightning(model: nn.Module) -> bool:
    """Whether ``model`` is a LightningModule; the package is not imported."""
    return _base(model) is not None


def _base(model: nn.Module) -> type | None:
    roots = ("lightning", "pytorch_lightning")
    return next(
        (kind for kind in type(model).__mro__
         if kind.__name__ == NAME and kind.__module__.partition(".")[0] in roots),
        None,
    )  # fmt: skip


@dataclass(frozen=True)
class Position:
    """Where a training is; all count from 0.

    Args:
        epoch: The epoch that runs.
        batch: The batch of it.
        step: The global step.
    """

    epoch: int
    batch: int
    step: int


class Attached:
    """What a LightningModule finds as ``self.trainer``: where the training is, and no more.

    Without it Lightning says that every epoch, step and rank is 0.

    Args:
        cluster: Of this task.
        position: Tells where the training is.
    """

    logger = progress_bar_callback = None
    loggers: tuple[Any, ...] = ()
    sanity_checking = False

    def __init__(self, cluster: ClusterSpec, position: Callable[[], Position]) -> None:
        self.global_rank, self.world_size = cluster.rank, cluster.world_size
        self.is_global_zero = cluster.is_chief
        self.position = position

    @property
    def current_epoch(self) -> int:
        """The epoch that runs, counted from 0."""
        return self.position().epoch

    @property
    def global_step(self) -> int:
        """How many updates are made."""
        return self.position().step

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UserError(
            f"self.trainer.{name} of a LightningModule: Lightning's own trainer has that",
            "Here self.trainer has current_epoch, global_step, global_rank and world_size: give "
            "the module other numbers as arguments, or write optimizer= and scheduler= of "
            "sp.Trainer.",
        )

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the module is attached to nothing


def parts_of(model: nn.Module, cluster: ClusterSpec, position: Callable[[], Position]) -> Parts:
    """What a LightningModule brings, with its ``self.log`` led to `spartito.log`.

    Args:
        model: The module.
        cluster: Of this task.
        position: Tells where the training is.

    Raises:
        UserError: It updates by hand, has several optimizers, or no ``training_step``.
    """
    base, module = _base(model), _any(model)
    kind = type(model).__name__
    if not getattr(model, "automatic_optimization", True):
        raise UserError(
            f"{kind} has automatic_optimization=False",
            f"Its updates are its own. {OWN_LOOP}",
        )
    if not _overrides(model, base, "training_step"):
        raise UserError(f"{kind} has no training_step", "Define training_step(self, batch).")
    if cluster.is_chief and (ignored := [name for name in HOOKS if _overrides(model, base, name)]):
        warn(
            "%s.%s is not called: write a callback of spartito for it", kind,
            f", {kind}.".join(ignored),
        )  # fmt: skip
    attached = Attached(cluster, position)
    for each in filter(is_lightning, model.modules()):
        _any(each).log, _any(each).log_dict, _any(each)._trainer = _log, _log_all, attached
    validates = _overrides(model, base, "validation_step")
    evaluate = partial(_evaluated, "validation_step" if validates else "training_step")
    made = module.configure_optimizers() if _overrides(model, base, "configure_optimizers") else ()
    optimizer, scheduler, interval, monitor = _configured(made, kind)
    train = partial(_trained, position)
    return Parts(train, evaluate, optimizer, scheduler, interval, monitor)


def _any(model: Any) -> Any:
    return model


def _overrides(model: nn.Module, base: type | None, name: str) -> bool:
    return getattr(type(model), name, None) is not getattr(base, name, None)


def _call(name: str, model: nn.Module, batch: Any, number: int = 0) -> Any:
    step: Callable[..., Any] = getattr(model, name)
    takes = signature(step).parameters
    more = [number] if "batch_idx" in takes or len(takes) > 1 else []
    return step(batch, *more)


def _trained(position: Callable[[], Position], model: nn.Module, batch: Any) -> Any:
    return _call("training_step", model, batch, position().batch)


def _evaluated(name: str, model: nn.Module, batch: Any) -> Any:
    """The loss of an evaluation's batch: reported as "val_loss", or returned.

    What is reported counts: Lightning takes no notice of what ``validation_step`` returns.
    """
    _reported.clear()
    found = _call(name, model, batch)
    if _reported and name == "validation_step":
        loss = _reported.pop()
        return {**found, "loss": loss} if isinstance(found, Mapping) else loss
    if isinstance(found, Mapping) and "loss" not in found and "val_loss" in found:
        return {**found, "loss": found["val_loss"]}
    if found is None or (isinstance(found, Tensor) and found.dim() > 1):
        raise UserError(
            f"{type(model).__name__}.{name} returns no loss, but {describe(found)}",
            'Return the loss, or log it as "val_loss".',
        )
    own_loss(found)
    return found


_reported: list[Tensor] = []
"""The loss that the present step has reported."""


def _log(
    name: str,
    value: Any,
    *_: Any,
    batch_size: int | None = None,
    reduce_fx: Any = "mean",
    **__: Any,
) -> None:
    """``self.log``: as `spartito.log`. When and where it is shown is decided by callbacks."""
    if hasattr(value, "compute"):
        raise UserError(
            f"self.log({name!r}, {type(value).__name__}) of a metric with a state",
            f"Log its value, self.log({name!r}, metric(output, y)), or return "
            '{"loss": ..., "output": ...} and give sp.Trainer(metrics=[...]) the metric.',
        )
    if reduce_fx not in ("mean", torch.mean):
        raise UserError(
            f"self.log({name!r}, ..., reduce_fx={reduce_fx!r})",
            "A figure is the mean over all examples: leave it out.",
        )
    if name in LOSSES:
        _reported[:] = [torch.as_tensor(value)]
        return  # the loss is a figure of its own
    for prefix in VALIDATIONS:
        name = name.removeprefix(prefix)
    log(name, value, batch_size)


def _log_all(values: Mapping[str, Any], *_: Any, **options: Any) -> None:
    """``self.log_dict``."""
    for name, value in values.items():
        _log(name, value, **options)


def _configured(made: Any, kind: str) -> tuple[Optimizer | None, Any, str, str | None]:
    """Optimizer and scheduler in any of the forms that ``configure_optimizers`` may return."""
    several = isinstance(made, list | tuple)
    if several and len(made) == 2 and all(isinstance(part, list) for part in made):
        optimizers, schedulers = made
    else:
        pairs = [_pair(each, kind) for each in (made if several else [made]) if each is not None]
        optimizers, schedulers = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if odd := [each for each in optimizers if not isinstance(each, Optimizer)]:
        raise _not_configured(kind, odd[0])
    schedulers = [each for each in schedulers if each is not None]
    if len(optimizers) > 1 or len(schedulers) > 1:
        raise UserError(
            f"{kind}.configure_optimizers returns {len(optimizers)} optimizers and "
            f"{len(schedulers)} schedulers",
            f"Spartito's fit has one of each. {OWN_LOOP}",
        )
    optimizer = optimizers[0] if optimizers else None
    if not schedulers:
        return optimizer, None, "step", None
    told = schedulers[0] if isinstance(schedulers[0], Mapping) else {"scheduler": schedulers[0]}
    if told.get("frequency", 1) != 1:
        raise UserError(
            f"{kind}.configure_optimizers: a scheduler with frequency={told['frequency']}",
            "It is stepped each time: leave that out, and write the schedule for it.",
        )
    scheduler = told["scheduler"]
    monitor = told.get("monitor") if isinstance(scheduler, ReduceLROnPlateau) else None
    return optimizer, scheduler, told.get("interval", "epoch"), monitor


def _pair(given: Any, kind: str) -> tuple[Any, Any]:
    """An optimizer, and its scheduler if it has one."""
    if not isinstance(given, Mapping):
        return given, None
    if "optimizer" not in given:
        raise _not_configured(kind, given)
    scheduler = given.get("lr_scheduler")
    if "monitor" in given and scheduler is not None and not isinstance(scheduler, Mapping):
        scheduler = {"scheduler": scheduler, "monitor": given["monitor"]}
    return given["optimizer"], scheduler


def _not_configured(kind: str, found: Any) -> UserError:
    what = f"a dict of {[*found]}" if isinstance(found, Mapping) else describe(found)
    return UserError(
        f"{kind}.configure_optimizers returns {what} where an optimizer is wanted",
        'Return the optimizer, ([optimizer], [scheduler]), or {"optimizer": ..., '
        '"lr_scheduler": ...}.',
    )
