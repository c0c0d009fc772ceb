"""What a user writes: names of other libraries, and what the environment overrides."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Concatenate, ParamSpec, TypeVar

from spartito.cluster.resolver import resolve
from spartito.errors import UserError
from spartito.names import ENV_EPOCHS, nearest, plural
from spartito.notes import note
from spartito.numeric import is_whole
from spartito.strategies import Strategy, job_strategy, strategy

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

ALIASES: Mapping[str, Mapping[str, str]] = {
    "Trainer": {
        "accumulate_grad_batches": "accumulate",
        "criterion": "loss",
        "gradient_accumulation_steps": "accumulate",
        "gradient_clip_val": "clip_norm",
        "loss_fn": "loss",
        "lr_scheduler": "scheduler",
        "max_grad_norm": "clip_norm",
    },
    "fit": {
        "dataset": "data",
        "max_epochs": "epochs",
        "num_epochs": "epochs",
        "train_data": "data",
        "train_dataloaders": "data",
        "train_loader": "data",
        "val_data": "validation_data",
        "val_dataloaders": "validation_data",
        "val_loader": "validation_data",
        "x": "data",
    },
    "evaluate": {"dataloaders": "data", "dataset": "data", "x": "data"},
    "predict": {"dataloaders": "data", "dataset": "data", "x": "data"},
    "BackupAndRestore": {"backup_dir": "directory", "save_freq": "every"},
    "CSVLogger": {"path": "filename"},
    "EarlyStopping": {},
    "LearningRateScheduler": {},
    "ModelCheckpoint": {
        "dirpath": "directory",
        "every_n_train_steps": "every_steps",
        "filepath": "directory",
    },
    "TensorBoard": {"log_dir": "directory"},
}
"""Names of Keras, Lightning, Accelerate and others that mean exactly one of ours."""

_MACHINES = "The launcher decides: spartito run --strategy mirrored --workers 2 train.py."
_VALIDATED = (
    "Write fit(..., steps_per_epoch=500, max_steps=10000): an epoch ends after 500 steps, and is "
    "validated. The data go on where they were."
)
_SELDOM = "Each epoch is validated: data.repeat(3) makes three passes of one."
_DATA = "Give the data to fit(data, validation_data=...)."
HINTS: Mapping[str, Mapping[str, str]] = {
    "Trainer": {
        "auto_scale_batch_size": "Call trainer.find_batch_size(data).",
        "auto_find_batch_size": "Call trainer.find_batch_size(data).",
        "auto_lr_find": "Call trainer.find_learning_rate(data).",
        "accelerator": "Write Strategy(device=...), as sp.OneDeviceStrategy(device='cuda').",
        "callbacks": "Write fit(..., callbacks=[...]).",
        "check_val_every_n_epoch": _SELDOM,
        "default_root_dir": "Write run_dir='runs/1'.",
        "devices": _MACHINES,
        "enable_progress_bar": "Write fit(..., verbose=0) for none.",
        "epochs": "Write fit(..., epochs=3).",
        "eval_dataset": _DATA,
        "eval_steps": _VALIDATED,
        "eval_strategy": _VALIDATED,
        "evaluation_strategy": _VALIDATED,
        "gradient_clip_algorithm": "Gradients are clipped by their global norm: clip_norm=1.0.",
        "limit_train_batches": "Write fit(..., steps_per_epoch=100).",
        "limit_val_batches": "Write fit(..., validation_steps=10).",
        "log_every_n_steps": "Write fit(callbacks=[sp.callbacks.ProgressBar(refresh_seconds=1)]).",
        "logger": "Write fit(callbacks=[sp.callbacks.TensorBoard()]), CSVLogger or WandbLogger.",
        "lr": "Write optimizer=torch.optim.Adam(model.parameters(), lr=1e-3).",
        "max_epochs": "Write fit(..., epochs=3).",
        "max_steps": "Write fit(..., max_steps=1000).",
        "mixed_precision": "Write precision='bf16'.",
        "nodes": _MACHINES,
        "num_nodes": _MACHINES,
        "num_train_epochs": "Write fit(..., epochs=3).",
        "optimizers": "Write optimizer=... and scheduler=...; for several use a loop of your own.",
        "sync_batchnorm": "Write sp.MirroredStrategy(sync_batchnorm=True).",
        "train_dataset": _DATA,
        "val_check_interval": _VALIDATED,
        "validation_freq": _SELDOM,
        "validation_interval": _VALIDATED,
    },
    "fit": {
        "ckpt_path": "Call trainer.load(path) before.",
        "eval_steps": _VALIDATED,
        "val_check_interval": _VALIDATED,
        "validation_freq": _SELDOM,
        "check_val_every_n_epoch": _SELDOM,
        "eval_strategy": _VALIDATED,
        "evaluation_strategy": _VALIDATED,
        "validation_interval": _VALIDATED,
        "datamodule": _DATA,
        "shuffle": "Write sp.data.arrays(x, y).shuffle().",
        "target": "Write fit((x, y)).",
        "validation_batch_size": "Write validation_data=sp.data.arrays(x, y).batch(500).",
        "y": "Write fit((x, y)).",
    },
    "evaluate": {"y": "Write evaluate((x, y)).", "sample_weight": "Give it as part of the target."},
    "predict": {"y": "A prediction takes no targets."},
    "BackupAndRestore": {
        "double_checkpoint": "Leave it out: the newest two are always kept.",
        "verbose": "Leave it out: what it goes on from is always said.",
    },
    "CSVLogger": {
        "separator": "Leave it out: columns are separated by commas.",
        "verbose": "Leave it out.",
    },
    "EarlyStopping": {
        "baseline": "Leave it out: compare trainer.history after fit() instead.",
        "verbose": "Leave it out: the end of fit() says why it stopped.",
    },
    "LearningRateScheduler": {"verbose": "Leave it out: the rate is among the figures."},
    "ModelCheckpoint": {
        "every_n_epochs": "Leave it out: every epoch is saved; keep=3 keeps the newest three.",
        "filename": "Leave it out: checkpoints are called by their step, step-00000400.",
        "initial_value_threshold": "Leave it out: the first epoch is the best so far.",
        "period": "Leave it out: every epoch is saved; keep=3 keeps the newest three.",
        "save_freq": "Write every_steps=100; after each epoch it is saved anyway.",
        "save_last": "Leave it out: the newest is always kept.",
        "save_top_k": "Write keep=3: the newest three and the best stay.",
        "save_weights_only": "Leave it out: model.safetensors in each checkpoint has the weights.",
        "verbose": "Leave it out.",
    },
    "TensorBoard": {
        "embeddings_freq": "Leave it out: figures of epochs are written.",
        "histogram_freq": "Leave it out: figures of epochs are written.",
        "profile_batch": "Leave it out, and use torch.profiler.",
        "update_freq": "Leave it out: figures are written after each epoch.",
        "write_graph": "Leave it out: figures of epochs are written.",
        "write_images": "Leave it out: figures of epochs are written.",
        "write_steps_per_second": "Leave it out: the speed is always written.",
    },
}
"""Names of theirs that mean something that is written elsewhere, and what to write."""


def known_names(
    name: str,
) -> Callable[[Callable[Concatenate[T, P], R]], Callable[Concatenate[T, P], R]]:
    """Have a method or a callback take the ``ALIASES`` of ``name``, and refuse what is unknown.

    The call itself is what a type checker sees: aliases are for people and their scripts.
    """

    def decorate(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
        form = signature(method)
        ours = list(form.parameters)[1:]
        count = sum(p.kind is Parameter.POSITIONAL_OR_KEYWORD for p in form.parameters.values())

        @wraps(method)
        def wrapped(self: T, /, *args: P.args, **options: P.kwargs) -> R:
            given = dict(options)
            if not given.keys() <= form.parameters.keys() or len(args) >= count:
                given = _translated(name, ours, args, given, self)
            if len(args) >= count:
                raise _too_many(name, ours, count - 1, len(args))
            try:
                form.bind(self, *args, **given)
            except TypeError as error:
                raise UserError(f"{name}(): {error}", f"Known: {', '.join(ours)}.") from None
            return method(self, *args, **given)  # type: ignore[arg-type]

        return wrapped

    return decorate


def _too_many(name: str, ours: list[str], count: int, given: int) -> UserError:
    """Of so many that were given without a name, of which ``count`` may be."""
    known, by_name = f"Known: {', '.join(ours)}.", [f"{each}=..." for each in ours[count:]]
    if by_name:
        words = [*ours[:count], *by_name[:2], *(["..."] if by_name[2:] else [])]
        known = f"Give the others by name: {name}({', '.join(words)}). {known}"
    return UserError(
        f"{name}() with {plural(given, 'positional argument')}, and it takes {count}", known
    )


def _translated(
    name: str, ours: list[str], args: tuple[Any, ...], given: dict[str, Any], trainer: Any
) -> dict[str, Any]:
    """``given`` by our names."""
    if len(args) == 2 and ours[0] == "data":
        raise UserError(f"{name}() with {len(args)} positional arguments", f"Write {name}((x, y)).")
    if "x" in given and "y" in given and "data" not in given and name != "predict":
        given = {**given, "x": (given["x"], given["y"])}
        del given["y"]
    cluster = trainer.coordination.cluster if hasattr(trainer, "coordination") else resolve()
    found: dict[str, Any] = {}
    for word, value in given.items():
        mine = ALIASES[name].get(word, word)
        if mine not in ours:
            near = get_close_matches(word, [*ours, *HINTS[name]], n=1, cutoff=0.8)
            hint = HINTS[name].get(near[0] if near else word) or nearest(word, ours)
            raise UserError(f"{name}() has no argument {word!r}", hint)
        if mine in found or (mine != word and mine in given):
            raise UserError(f"{name}() has {mine} twice", f"{word} means {mine}: give one of them.")
        if mine != word and cluster.is_chief:
            note("%s(): %s is %s here", name, word, mine)
        found[mine] = None if mine != word and mine == "clip_norm" and value == 0 else value
    return found


def check_steps(call: str, steps: int | None) -> None:
    """Refuse a number of steps that is none.

    Args:
        call: Whose argument it is.
        steps: What the script says; None: all.

    Raises:
        UserError: It is no whole number of 1 or more.
    """
    if steps is not None and (not is_whole(steps) or steps < 1):
        raise UserError(f"{call}={steps!r})", "A whole number of 1 or more, or None for all.")


def asked_epochs(
    epochs: int | None,
    steps: int | None,
    max_steps: int | None = None,
    length: int | None = None,
    accumulate: int = 1,
    first: int | None = None,
) -> int:
    """The number of epochs that the environment asks for, else the script's.

    Args:
        epochs: What the script says; None: one, or as many as ``max_steps`` needs.
        steps: The batches of an epoch that it asks for.
        max_steps: The updates with which training ends.
        length: The batches of an epoch, where anybody knows.
        accumulate: How many of them make an update.
        first: The epoch to begin with, where the script says one.

    Raises:
        UserError: For less than none, or no step of each.
    """
    if text := os.environ.get(ENV_EPOCHS):
        if not (text.isascii() and text.isdigit()):
            raise UserError(f"{ENV_EPOCHS}={text!r} is not a whole number", "As 3, or unset it.")
        epochs = int(text)
    counts = {"epochs": epochs, "steps_per_epoch": steps, "max_steps": max_steps}
    counts |= {"initial_epoch": first}
    for name, value in counts.items():
        if value is not None and not is_whole(value):
            raise UserError(
                f"fit({name}={value!r}) is a {type(value).__name__}", f"A whole number: {name}=3."
            )
        if value is not None and value < ("steps" in name):
            raise UserError(f"fit({name}={value})", "Epochs are 0 or more, steps 1 or more.")
    if epochs is not None:
        return epochs
    if max_steps is None:
        return 1
    return math.ceil(max_steps / math.ceil(length / accumulate)) if length else max_steps


def has_epochs(epochs: int | None) -> bool:
    """Whether the script or the environment says how many epochs there are.

    Args:
        epochs: What the script says.
    """
    return epochs is not None or bool(os.environ.get(ENV_EPOCHS))


def asked_strategy(asked: object) -> Strategy:
    """The strategy of a trainer.

    Args:
        asked: A strategy, the text of one as `sp.strategy` takes it, or None: that of the job.

    Raises:
        UserError: It is none of these, or cannot run on this cluster.
    """
    if isinstance(asked, Strategy):
        return asked
    if asked is None:
        return job_strategy()
    if isinstance(asked, str):
        return strategy(asked)
    raise UserError(
        f"strategy={asked!r} is a {type(asked).__name__}", 'Give sp.strategy(), or "mirrored".'
    )
