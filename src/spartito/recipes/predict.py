"""A trained run applied to image files."""

from __future__ import annotations

import importlib
import json as json_format
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from spartito.checkpoint.manager import CheckpointManager, read_checkpoint
from spartito.errors import CorruptSampleError, UserError, show
from spartito.names import RECIPES

BATCH = 32


def main(run: Path, files: Sequence[Path], json: bool = False) -> int:
    """Print the label and its probability for each of ``files``; returns the exit code.

    The best checkpoint of the run folder is used, else the newest. A file that cannot be read
    is named on stderr and makes the exit code 2; the others are printed all the same.
    """
    config = _config(run)
    classes = config["data"]["classes"]
    recipe: Any = importlib.import_module(f"spartito.recipes.{config['recipe']['name']}")
    model = recipe.build()
    model.load_state_dict(_checkpoint(run)["model"])
    model.eval()
    code = 0
    for start in range(0, len(files), BATCH):
        paths, images = [], []
        for path in files[start : start + BATCH]:
            try:
                images.append(recipe.read(path))
            except CorruptSampleError as error:
                code = show(error)
            else:
                paths.append(path)
        if not images:
            continue
        with torch.no_grad():
            scores = recipe.probabilities(model(torch.stack(images)))
        for path, score, index in zip(paths, *scores.max(1), strict=True):
            found = {"path": str(path), "label": classes[index], "score": round(float(score), 6)}
            print(json_format.dumps(found) if json else _line(found))
    return code


def _line(found: dict[str, Any]) -> str:
    return f"{found['path']}: {found['label']} ({found['score']:.1%})"


def _config(run: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json_format.loads((run / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{run} is no run folder: {error}", "Give the folder that --out named in training."
        ) from error
    if config.get("recipe", {}).get("name") not in RECIPES:
        raise UserError(
            f"{run} was trained by a script, not by a recipe",
            "Build its model in your own script, and use trainer.load() and trainer.predict().",
        )
    return config


def _checkpoint(run: Path) -> dict[str, Any]:
    manager = CheckpointManager(run / "checkpoints")
    path = manager.best or manager.latest()
    if path is None:
        raise UserError(f"{run} holds no checkpoint", "Train for at least one epoch.")
    return read_checkpoint(path)
