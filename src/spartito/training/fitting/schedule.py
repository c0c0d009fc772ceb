"""When the learning rates change: after each global step, or after an epoch and its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from spartito.errors import UserError
from spartito.names import nearest
from spartito.notes import warn
from spartito.report.figures import VALIDATION, higher_is_better
from spartito.training.callbacks.monitor import Monitor

Scheduler = LRScheduler | ReduceLROnPlateau
SchedulerLike = Scheduler | Callable[[Optimizer], Scheduler]

INTERVALS = ("step", "epoch")
COLLAPSE = 0.01
"""A rate that stays below this part of what it was at the beginning of the epoch has collapsed."""
LONG = 0.25
"""The part of an epoch that it must stay there: a cosine that ends with the epoch does not."""
FEW = 2
"""And the batches that are computed with it: a schedule that ends as planned has one."""


class Schedule:
    """A scheduler of torch's, or none, and when it is stepped.

    `ReduceLROnPlateau` is stepped after each epoch with the figure ``monitor``; None takes
    ``val_loss``, or ``loss`` without validation. All others follow ``interval``.
    """

    def __init__(self, scheduler: Scheduler | None, interval: str, monitor: str | None) -> None:
        """Raise `UserError` for what does not go together."""
        if interval not in INTERVALS:
            raise UserError(f"scheduler_interval={interval!r}", nearest(interval, INTERVALS))
        self.scheduler = scheduler
        self._by_epoch = interval == "epoch" or isinstance(scheduler, ReduceLROnPlateau)
        self._monitor = None if monitor is None else Monitor(monitor)
        self._check_monitor()
        self._warned = False
        self.ahead = 0
        """So many steps it leaves out first."""
        self.begin_epoch()

    @property
    def by_step(self) -> LRScheduler | None:
        """The scheduler, if it is stepped once per global step."""
        return None if self._by_epoch else self.scheduler

    def go_on(self, state: dict[str, Any] | None, ahead: int) -> None:
        """Be as was saved, and ``ahead`` of the position by so many steps, or behind."""
        load_scheduler(self.scheduler, state)
        if self.by_step is None:
            return
        self.ahead = max(0, ahead)
        for _ in range(-ahead):
            self.by_step.step()

    def check_figures(self, metrics: Iterable[str], validates: bool) -> None:
        """Raise `UserError` when no epoch of a fit will report the figure to watch.

        A name that is like no other may be one of the model's own (`spartito.log`).
        """
        if self._monitor is None:
            return
        names, wanted = ["loss", *metrics], self._monitor.name
        known = [*names, *(VALIDATION + name for name in names if validates)]
        lacks_validation = wanted.startswith(VALIDATION) and not validates
        if wanted in names or lacks_validation or get_close_matches(wanted, known, cutoff=0.7):
            self._monitor.read(dict.fromkeys(known, 0.0))

    def begin_epoch(self) -> None:
        """Remember the rate that an epoch begins with."""
        self._first = self._rate()
        self._seen = self._low = 0

    def came(self, batches: int, updates: int, steps: int | None) -> None:
        """After ``batches`` of the epoch's ``steps``, which made ``updates`` global steps."""
        if self.scheduler is None or self._by_epoch:
            return
        self._low = self._low + batches if self._rate() < COLLAPSE * self._first else 0
        left_out = min(self.ahead, updates)
        self.ahead -= left_out
        for _ in range(updates - left_out):
            self.scheduler.step()
        self._seen += batches
        if steps is not None:
            self._judge(steps)

    def end_epoch(self, figures: Mapping[str, float]) -> bool:
        """After an epoch; returns whether that changed the rates."""
        if self.scheduler is None:
            return False
        if not self._by_epoch:
            self._judge(self._seen)
            return False
        if isinstance(self.scheduler, ReduceLROnPlateau):
            watched = figures.get("val_loss", figures["loss"])
            if self._monitor is not None:
                watched = self._monitor.read(figures)
            self.scheduler.step(watched)
        else:
            self.scheduler.step()
        return True

    def _rate(self) -> float:
        if self.scheduler is None:
            return 0.0
        return max(float(group["lr"]) for group in self.scheduler.optimizer.param_groups)

    def _judge(self, steps: int) -> None:
        if self._warned or self._low < max(FEW, LONG * steps):
            return
        self._warned = True
        warn(
            "the learning rate fell from %.3g to %.3g within one epoch: %s is stepped after each "
            "of its %d global steps. If its numbers mean epochs, give the Trainer "
            'scheduler_interval="epoch".',
            self._first,
            self._rate(),
            type(self.scheduler).__name__,
            steps,
        )

    def _check_monitor(self) -> None:
        plateau = self.scheduler if isinstance(self.scheduler, ReduceLROnPlateau) else None
        if self._monitor is None:
            if plateau is not None and plateau.mode == "max":
                raise UserError(
                    "ReduceLROnPlateau(mode='max') without a figure to watch: that is no loss",
                    'Name it: Trainer(..., scheduler_monitor="val_accuracy").',
                )
            return
        name = self._monitor.name
        if plateau is None:
            raise UserError(
                f"scheduler_monitor={name!r} without a ReduceLROnPlateau",
                "Other schedules follow the steps alone: leave it out.",
            )
        higher, lower = higher_is_better(name), name.removeprefix(VALIDATION) == "loss"
        if (higher and plateau.mode == "min") or (lower and plateau.mode == "max"):
            raise UserError(
                f"ReduceLROnPlateau(mode={plateau.mode!r}) watches {name!r}, "
                f"of which {'more' if higher else 'less'} is better",
                f"Use mode={'max' if higher else 'min'!r}.",
            )


def make_scheduler(given: SchedulerLike | None, optimizer: Optimizer) -> Scheduler | None:
    """The scheduler that a user gave, or has a function make; `UserError` if it is another's."""
    if given is None:
        return None
    made = given if isinstance(given, LRScheduler) else _made(given, optimizer)
    if made.optimizer is not optimizer:
        raise UserError(
            f"the {type(made).__name__} schedules another optimizer than the trainer's",
            "Give a function: scheduler=lambda optimizer: StepLR(optimizer, 30).",
        )
    return made


def _made(given: Any, optimizer: Optimizer) -> Scheduler:
    name = getattr(given, "__name__", repr(given))
    if not callable(given):
        raise UserError(f"scheduler={given!r} is none", "Give one of torch.optim.lr_scheduler.")
    try:
        signature(given).bind(optimizer)
    except TypeError as error:
        raise UserError(
            f"scheduler={name} is called with the optimizer: {error}",
            f"Write scheduler=lambda optimizer: {name}(optimizer, ...).",
        ) from None
    made: Scheduler = given(optimizer)
    return made


def scheduler_state(scheduler: Scheduler | None) -> dict[str, Any] | None:
    """What a checkpoint keeps of it."""
    return None if scheduler is None else dict(scheduler.state_dict())


def load_scheduler(scheduler: Scheduler | None, state: dict[str, Any] | None) -> None:
    """Take back what `scheduler_state` returned, as a checkpoint has it."""
    if scheduler is not None and state is not None:
        scheduler.load_state_dict(_in_kinds_of(scheduler.state_dict(), state))


def _in_kinds_of(now: Any, saved: Any) -> Any:
    """What was ``saved`` of a scheduler, with the kinds of dict that it has ``now``.

    A checkpoint knows one kind, and torch asks more of some: `MultiStepLR` of its milestones, a
    Counter, where it comes after a warm-up in a `SequentialLR`.
    """
    if isinstance(now, dict) and isinstance(saved, dict):
        found = {key: _in_kinds_of(now.get(key), value) for key, value in saved.items()}
        return Counter(found) if isinstance(now, Counter) else found
    if isinstance(now, list) and isinstance(saved, list) and len(now) == len(saved):
        return [_in_kinds_of(*pair) for pair in zip(now, saved, strict=True)]
    return saved
