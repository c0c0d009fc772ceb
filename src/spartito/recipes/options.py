"""The command line that all recipes share, and how they end."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from spartito.checkpoint.manager import CheckpointManager
from spartito.errors import UserError
from spartito.names import ENV_RUN_DIR, RECIPE_SEED, new_run_folder
from spartito.report.lines import line_of
from spartito.strategies import Strategy
from spartito.training.trainer import Trainer


@dataclass(frozen=True)
class Options:
    """What the user chose; every count is global. ``named`` is the run folder, if he named one."""

    named: Path | None
    epochs: int
    data: Path | None
    batch_size: int
    seed: int
    precision: str
    resume: bool
    json: bool


def parse(recipe: str, epochs: int, batch_size: int, precision: str = "fp32") -> Options:
    """The options of ``recipe``, with its own defaults."""
    folder = os.environ.get(ENV_RUN_DIR)
    parser = argparse.ArgumentParser(prog=f"spartito train {recipe}")
    parser.add_argument("--out", dest="named", type=Path, default=Path(folder) if folder else None)
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--batch-size", type=int, default=batch_size)
    parser.add_argument("--seed", type=int, default=RECIPE_SEED)
    parser.add_argument("--precision", default=precision)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = Options(**vars(parser.parse_args()))
    if options.epochs < 1 or options.batch_size < 1:
        raise UserError(
            f"--epochs {options.epochs} --batch-size {options.batch_size}", "Both are 1 or more."
        )
    if options.resume and (
        options.named is None or CheckpointManager(options.named / "checkpoints").latest() is None
    ):
        raise UserError(
            f"--resume: {options.named or 'no run folder'} holds no checkpoint to go on from",
            "Name the run folder by --out, or start anew without --resume.",
        )
    return options


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


def finish(trainer: Trainer, options: Options) -> None:
    """On the chief: say what came out, and where it lies."""
    out = trainer.run_dir
    if out is None or not trainer.is_chief:
        return
    last = {name: values[-1] for name, values in trainer.history.history.items() if values}
    model = CheckpointManager(out / "checkpoints").latest()
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
