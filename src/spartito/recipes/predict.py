"""A trained run applied: to image files, or to the beginning of a text."""

from __future__ import annotations

import importlib
import json as json_format
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spartito.checkpoint.manager import CheckpointManager, read_checkpoint
from spartito.data.sets.text import decode, encode
from spartito.errors import CorruptSampleError, UserError, show
from spartito.names import RECIPES

BATCH = 32


WRITING: dict[str, Any] = {"prompt": "\n", "length": 500, "temperature": 0.8, "seed": 0}
"""How a model writes where nobody says otherwise."""


def main(run: Path, files: Sequence[Path], writing: Mapping[str, Any], json: bool = False) -> int:
    """Print what the model of a run folder makes of ``files``, or how it goes on writing.

    Args:
        run: The folder; its best checkpoint is used, else the newest.
        files: Images.
        writing: What is to be unlike `WRITING`.
        json: Print JSON, an object for each file or text.

    Returns:
        The exit code: 2 where a file cannot be read, which stderr names.

    Raises:
        UserError: Files for a model that writes, a text for one that looks at files, or no such
            run.
    """
    config = _config(run)
    name, classes = config["recipe"]["name"], config["data"]["classes"]
    recipe: Any = importlib.import_module(f"spartito.recipes.{name}")
    if hasattr(recipe, "read"):
        if writing or not files:
            wrong = f" and takes no --{next(iter(writing))}" if writing else ""
            raise UserError(
                f"{run} was trained by {name}, which looks at files{wrong}", "Name one or more."
            )
        return _look(_loaded(run, recipe.build()), recipe, files, classes, json)
    if files:
        raise UserError(
            f"{run} was trained by {name}, which writes, and looks at no {files[0]}",
            "Give the beginning of a text: --prompt TEXT.",
        )
    model = _loaded(run, recipe.build(len(classes)))
    return _write(model, {**WRITING, **writing}, classes, json)


def _look(model: Any, recipe: Any, files: Sequence[Path], classes: Any, json: bool) -> int:
    """Print the label and its probability for each of ``files``."""
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


def _write(model: Any, writing: Mapping[str, Any], classes: Sequence[str], json: bool) -> int:
    """Print a text that begins as the user said."""
    begun = encode(writing["prompt"] or WRITING["prompt"], classes)[None]
    tokens = model.generate(begun, writing["length"], writing["temperature"], writing["seed"])
    text = decode(tokens[0], classes)
    print(json_format.dumps({**writing, "text": text}) if json else text)
    return 0


def _config(run: Path) -> dict[str, Any]:
    try:
        config: Any = json_format.loads((run / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{run} is no run folder: {getattr(error, 'strerror', None) or error}",
            "Give the folder that --out named in training.",
        ) from error
    if not isinstance(config, dict):
        raise UserError(
            f"{run} is no run folder: config.json is no settings of a run",
            "Give the folder that --out named in training.",
        )
    if config.get("recipe", {}).get("name") not in RECIPES:
        raise UserError(
            f"{run} was trained by a script, not by a recipe",
            "Build its model in your own script, and use trainer.load() and trainer.predict().",
        )
    return dict(config)


def _loaded(run: Path, model: torch.nn.Module) -> torch.nn.Module:
    """``model`` with the values of the best checkpoint."""
    manager = CheckpointManager(run / "checkpoints")
    path = manager.best or manager.latest()
    if path is None:
        raise UserError(f"{run} holds no checkpoint", "Train for at least one epoch.")
    model.load_state_dict(read_checkpoint(path)["model"])
    return model.eval()
