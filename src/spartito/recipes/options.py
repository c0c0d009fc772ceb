"""The command line that all recipes share, and how they end."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from pathlib import Path

from spartito.checkpoint.manager import CheckpointManager
from spartito.data.dataset import Dataset
from spartito.errors import UserError
from spartito.names import ENV_QUEUED_AGAIN, ENV_RESUME, ENV_RUN_DIR, RECIPE_SEED, new_run_folder
from spartito.report.lines import line_of
from spartito.strategies import Strategy
from spartito.training.backups.folder import BACKUPS, LocalBackups, folder_of
from spartito.training.callbacks import BackupAndRestore, ModelCheckpoint, TensorBoard
from spartito.training.trainer import Trainer

EVERY = 100
"""Global steps from one backup to the next, where they take no more than their share."""
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Options:
    """What the user chose; every count is global. ``named`` is the run folder, if he named one."""

    named: Path | None
    epochs: int
    data: str | None
    batch_size: int
    seed: int
    precision: str
    resume: bool
    json: bool


def parse(recipe: str, epochs: int, batch_size: int) -> Options:
    """The options of ``recipe``, with its own defaults."""
    folder = os.environ.get(ENV_RUN_DIR)
    parser = argparse.ArgumentParser(prog=f"spartito train {recipe}")
    parser.add_argument("--out", dest="named", type=Path, default=Path(folder) if folder else None)
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--data")
    parser.add_argument("--batch-size", type=int, default=batch_size)
    parser.add_argument("--seed", type=int, default=RECIPE_SEED)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = Options(**vars(parser.parse_args()))
    if options.epochs < 1 or options.batch_size < 1:
        raise UserError(
            f"--epochs {options.epochs} --batch-size {options.batch_size}", "Both are 1 or more."
        )
    saved = options.named is not None and _goes_on_from(options.named)
    if saved and any(os.environ.get(name, "0") != "0" for name in (ENV_QUEUED_AGAIN, ENV_RESUME)):
        return replace(options, resume=True)
    if options.resume and not saved:
        raise UserError(
            f"--resume: {options.named} holds no checkpoint to go on from"
            if options.named
            else "--resume without a run folder to go on from",
            "Name the run folder by --out, or start anew without --resume.",
        )
    return options


def _goes_on_from(out: Path) -> bool:
    """Whether a run folder holds a checkpoint or a backup."""
    folders = CHECKPOINTS, BACKUPS / folder_of(1)
    return any(CheckpointManager(out / folder).all() for folder in folders)


def run_folder(options: Options, strategy: Strategy, recipe: str) -> Path:
    """Where the run is kept: as the user says, else a new folder that the chief names for all.

    Raises `UserError` where there is a task that does not meet the chief.
    """
    if options.named is not None:
        return options.named
    job = strategy.job
    if job.addresses.get("ps") or job.has_evaluator:
        raise UserError(
            f"{strategy.task} cannot know the run folder that the chief chooses",
            "Name it, the same for all tasks: --out runs/1.",
        )
    return Path(strategy.coordination.tell_all(new_run_folder(recipe))[0])


def fit(
    trainer: Trainer,
    options: Options,
    train: Dataset,
    validation: Dataset,
    checkpoints: ModelCheckpoint,
) -> None:
    """Train as the options say, close the strategy, and say what came out."""
    backups = go_on(trainer, options)
    trainer.fit(
        train,
        epochs=options.epochs,
        validation_data=validation,
        callbacks=[checkpoints, TensorBoard(), backups],
    )
    _finish(trainer, options)
    trainer.strategy.close()


def go_on(trainer: Trainer, options: Options) -> BackupAndRestore:
    """Have ``--resume`` go on from the newest checkpoint or backup; the callback is for `fit`.

    Without it backups of another run in this folder are removed.
    """
    out, coordination = trainer.run_dir, trainer.coordination
    assert out is not None
    if not coordination.joins:
        own = "yes" if options.resume and CheckpointManager(out / CHECKPOINTS).all() else ""
        saved = any(coordination.tell_all(own))
        # Who replaces a lost worker finds what was written meanwhile: the chief's word counts.
        if coordination.publish(lambda: saved):
            trainer.load(out / CHECKPOINTS)
        elif trainer.is_chief and not coordination.job.is_evaluator and not options.resume:
            LocalBackups(out / BACKUPS / folder_of(1)).remove()
    return BackupAndRestore(every=EVERY)


def _finish(trainer: Trainer, options: Options) -> None:
    """On the chief: say what came out, and where it lies."""
    out = trainer.run_dir
    if out is None or not trainer.is_chief:
        return
    last = {name: values[-1] for name, values in trainer.history.history.items() if values}
    model = CheckpointManager(out / CHECKPOINTS).latest()
    where = {
        "model": str(_model_in(model)) if model else None,
        "report": str(out / "report.html"),
    }
    if not last:
        print(f"nothing to train: {trainer.epoch} epochs are done, and --epochs counts them too")
    if "val_accuracy" in last:
        print(f"validation accuracy {last['val_accuracy']:.2%}")
    for name, path in where.items():
        print(f"{name:<7}{path}")
    if options.json:
        print(line_of({**last, "epochs": trainer.epoch, "steps": trainer.step, **where}))


def _model_in(checkpoint: Path) -> Path:
    """The file of the model; of one that several files hold, the checkpoint."""
    file = checkpoint / "model.safetensors"
    return file if file.exists() else checkpoint
