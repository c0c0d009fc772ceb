"""A LightningModule as a model: its steps, its optimizer and its figures, without Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from spartito.engine.logged import log
from spartito.engine.loss import own_loss
from spartito.errors import UserError
from spartito.notes import warn
from spartito.training.custom_step import StepFunction

NAME = "LightningModule"
VALIDATION = "val_"
LOSSES = ("loss", "val_loss")
HOOKS = (
    "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_fit_end",
    "on_fit_start", "on_train_batch_end", "on_train_batch_start", "on_train_end",
    "on_train_epoch_end", "on_train_epoch_start", "on_train_start", "on_validation_epoch_end",
    "on_validation_epoch_start", "configure_gradient_clipping", "lr_scheduler_step",
    "optimizer_step", "backward",
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


def parts_of(model: nn.Module, is_chief: bool) -> Parts:
    """What a LightningModule brings, with its ``self.log`` led to `spartito.log`.

    Args:
        model: The module.
        is_chief: Whether this task speaks to people.

    Raises:
        UserError: It updates by hand, has several optimizers, or no ``training_step``.
    """
    base, module = _base(model), _any(model)
    kind = type(model).__name__
    if not getattr(model, "automatic_optimization", True):
        raise UserError(
            f"{kind} has automatic_optimization=False",
            "Write its updates as a loop: strategy.prepare, strategy.backward, strategy.update.",
        )
    if not _overrides(model, base, "training_step"):
        raise UserError(f"{kind} has no training_step", "Define training_step(self, batch).")
    if is_chief and (ignored := [name for name in HOOKS if _overrides(model, base, name)]):
        warn(
            "%s.%s is not called: write a callback of spartito for it", kind,
            f", {kind}.".join(ignored),
        )  # fmt: skip
    module.log, module.log_dict = _log, _log_all
    validates = _overrides(model, base, "validation_step")
    evaluate = partial(_evaluated, "validation_step" if validates else "training_step")
    made = module.configure_optimizers() if _overrides(model, base, "configure_optimizers") else ()
    optimizer, scheduler, interval, monitor = _configured(made, kind)
    return Parts(partial(_call, "training_step"), evaluate, optimizer, scheduler, interval, monitor)


def _any(model: Any) -> Any:
    return model


def _overrides(model: nn.Module, base: type | None, name: str) -> bool:
    return getattr(type(model), name, None) is not getattr(base, name, None)


def _call(name: str, model: nn.Module, batch: Any) -> Any:
    step: Callable[..., Any] = getattr(model, name)
    takes = signature(step).parameters
    more = [0] if "batch_idx" in takes or len(takes) > 1 else []
    return step(batch, *more)


def _evaluated(name: str, model: nn.Module, batch: Any) -> Any:
    """The loss of an evaluation's batch: returned, or reported as "val_loss"."""
    _reported.clear()
    found = _call(name, model, batch)
    if found is None and _reported:
        return _reported.pop()
    if found is None:
        raise UserError(
            f"{type(model).__name__}.{name} returns no loss", 'Return it, or log it as "val_loss".'
        )
    own_loss(found)
    return found


_reported: list[Tensor] = []
"""The loss that the present step has reported."""


def _log(name: str, value: Any, *_: Any, batch_size: int | None = None, **__: Any) -> None:
    """``self.log``: as `spartito.log`. When and where it is shown is decided by callbacks."""
    short = name.removeprefix(VALIDATION)
    if name in LOSSES:
        if isinstance(value, Tensor):
            _reported[:] = [value]
        return  # the loss is a figure of its own
    if isinstance(value, int | float | Tensor):
        log(short, value, batch_size)


def _log_all(values: Mapping[str, Any], *_: Any, **options: Any) -> None:
    """``self.log_dict``."""
    for name, value in values.items():
        _log(name, value, **options)


def _configured(made: Any, kind: str) -> tuple[Optimizer | None, Any, str, str | None]:
    """Optimizer and scheduler in any of the forms that ``configure_optimizers`` may return."""
    if isinstance(made, tuple) and len(made) == 2 and all(isinstance(p, list) for p in made):
        optimizers, schedulers = made
    elif isinstance(made, Mapping):
        optimizers, schedulers = [made["optimizer"]], [made.get("lr_scheduler")]
    else:
        optimizers, schedulers = list(_flat(made)), []
    schedulers = [each for each in schedulers if each is not None]
    if len(optimizers) > 1 or len(schedulers) > 1:
        raise UserError(
            f"{kind}.configure_optimizers returns {len(optimizers)} optimizers and "
            f"{len(schedulers)} schedulers",
            "Spartito's fit has one of each: write several as a loop of your own.",
        )
    optimizer = optimizers[0] if optimizers else None
    if not schedulers:
        return optimizer, None, "step", None
    told = schedulers[0] if isinstance(schedulers[0], Mapping) else {"scheduler": schedulers[0]}
    return optimizer, told["scheduler"], told.get("interval", "epoch"), told.get("monitor")


def _flat(made: Any) -> Iterator[Any]:
    if isinstance(made, Optimizer):
        yield made
    elif isinstance(made, list | tuple):
        for each in made:
            yield from _flat(each["optimizer"] if isinstance(each, Mapping) else each)
