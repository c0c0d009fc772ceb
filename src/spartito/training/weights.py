"""A model's weights alone: as one file, and from the files of others."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from spartito.checkpoint.convert import FORMS, check_form, write_model
from spartito.checkpoint.foreign_files import MODEL, Opened, opened
from spartito.checkpoint.in_store import fetch_checkpoint
from spartito.checkpoint.saved_state import Saved
from spartito.checkpoint.stored_parts import Reader, Tensors
from spartito.engine.optimizers import unwrap
from spartito.errors import UserError
from spartito.names import nearest
from spartito.steps.state_parts import names_of_all
from spartito.storage.atomic import writable
from spartito.storage.leftovers import NEW, beside
from spartito.storage.tensors import same_tensors
from spartito.urls import is_remote, local_path

if TYPE_CHECKING:
    from spartito.training.trainer import Trainer

WRAPPERS = ("module.", "_orig_mod.")
"""What torch's DDP and compile put before every name."""


class Loaded(NamedTuple):
    """What `Trainer.load_weights` did not load; both are empty with ``strict``.

    Args:
        missing: Names of the model that the file does not have: these keep their values.
        unexpected: Names of the file that the model does not have.
    """

    missing: list[str]
    unexpected: list[str]


def save_weights(trainer: Trainer, path: str | Path) -> Path:
    """As `Trainer.save_weights`."""
    target = _named(str(path), trainer)
    check_form(target)
    if target.is_dir():
        raise UserError(f"{target} is a folder", f"Name a file in it: {target / 'model'}{FORMS[0]}")
    attempt = trainer.coordination.attempt

    def begin() -> str:
        if not trainer.is_chief:
            return ""
        with writable(target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
            new = beside(target, NEW)
            new.mkdir()
            return str(new)

    folder = Path(attempt(begin)[0])

    def end() -> str:
        if trainer.is_chief:
            tensors = Reader(folder, MODEL)
            write_model(target.resolve(), tensors, tensors.read)  # a link stays one
        return ""

    try:
        trainer.strategy.engine.save_model(folder)
        attempt(end)
    finally:
        if trainer.is_chief:
            shutil.rmtree(folder, ignore_errors=True)
    return target


def load_weights(trainer: Trainer, path: str | Path, strict: bool) -> Loaded:
    """As `Trainer.load_weights`."""
    attempt = trainer.coordination.attempt
    found: list[Opened] = []

    def look() -> str:
        found.append(opened(_fetched(str(path))))
        return _checksum(found[0].model) if trainer.coordination.cluster.world_size > 1 else ""

    if len(set(attempt(look))) > 1:
        raise UserError(
            f"the replicas have read different files at {path}",
            "All must read the same one: in a folder that all machines share, or equal copies.",
        )
    model, engine = unwrap(trainer.model), trainer.strategy.engine
    with engine.parts.showing():
        names = names_of_all(model, attempt)
        tree = _unwrapped(found[0].trees[MODEL], names)
        _check_has_any(path, tree, names)
        told = attempt(lambda: json.dumps(same_tensors(model.state_dict())))
    engine.load(Saved({MODEL: tree}, partial(_section, found[0]), strict))
    there = names & tree.keys()
    for name, owner in [tie for ties in map(json.loads, told) for tie in ties.items()]:
        if there & {name, owner}:
            there |= {name, owner}
    return Loaded(sorted(names - there), sorted(tree.keys() - names))


def _checksum(model: Tensors) -> str:
    """The same where names, shapes and all values are."""
    found = 0
    for name in sorted(model.names):
        tensor = model.read(name)
        found = zlib.crc32(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode(), found)
        found = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


def _section(found: Opened, name: str) -> Any:
    return found.sections[name]


def _fetched(path: str) -> Path:
    if not is_remote(path) or local_path(path):
        return Path(local_path(path))
    if Path(path).suffix:
        raise UserError(f"{path} is a file in a store", "Copy it to this machine first.")
    return fetch_checkpoint(path)


def _unwrapped(tree: Any, names: Set[str]) -> Mapping[str, Any]:
    """The tree by the names that the model has, without those of wrappers before them."""
    found: Mapping[str, Any] = tree
    while not found.keys() & names and (prefix := _wrapper(found)):
        found = {name.removeprefix(prefix): leaf for name, leaf in found.items()}
    return found


def _wrapper(tree: Mapping[str, Any]) -> str | None:
    return next((p for p in WRAPPERS if tree and all(name.startswith(p) for name in tree)), None)


def _check_has_any(path: str | Path, tree: Mapping[str, Any], names: Set[str]) -> None:
    """Refuse a file of another model: without ``strict`` nothing would be loaded, unnoticed."""
    if names and not tree.keys() & names:
        raise UserError(
            f"{path} has no tensor of this model: it names {min(tree, default='none')}, the model "
            f"{min(names)}",
            "Load it into the part of the model that it is of, or rename its tensors.",
        )


def _named(text: str, trainer: Trainer) -> Path:
    """The path with the figures of the last epoch in place of ``{name}``."""
    if is_remote(text) and not local_path(text):
        raise UserError(f"save_weights({text!r}) to a store", "Write trainer.save(url) there.")
    last = {name: values[-1] for name, values in trainer.history.history.items()}
    figures = {**last, "epoch": trainer.epoch, "step": trainer.step}
    try:
        return Path(local_path(text).format_map(_Figures(figures)))
    except (ValueError, IndexError, TypeError) as error:
        raise UserError(
            f"save_weights({text!r}): {error}", "Write figures as {epoch:02d} or {val_loss:.3f}."
        ) from None


class _Figures(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise UserError(f"a file is to be named by {{{name}}}", nearest(name, sorted(self)))
