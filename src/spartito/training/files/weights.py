"""A model's weights alone: as one file, from the files of others, and as a model again."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from spartito.checkpoint.convert import FORMS, check_form, write_model
from spartito.checkpoint.foreign_files import MODEL, Opened, opened
from spartito.checkpoint.in_store import fetch_checkpoint
from spartito.checkpoint.saved_state import Saved
from spartito.checkpoint.stored_parts import Reader, Tensors
from spartito.engine.losses.loss import describe
from spartito.engine.meta.meta_models import is_unmade
from spartito.engine.updates.optimizers import unwrap
from spartito.errors import UserError
from spartito.names import nearest
from spartito.steps.state_parts import load_model as load_whole
from spartito.steps.state_parts import names_of_all
from spartito.storage.atomic import check_not_protected, folder_beside
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

    with ExitStack() as stack:

        def begin() -> str:
            if not trainer.is_chief:
                return ""
            check_not_protected(target)
            return str(stack.enter_context(folder_beside(target)))

        folder = Path(attempt(begin)[0])

        def end() -> str:
            if trainer.is_chief:
                tensors = Reader(folder, MODEL)
                write_model(target.resolve(), tensors, tensors.read)  # a link stays one
            return ""

        trainer.strategy.engine.save_model(folder)
        attempt(end)
    return target


def load_weights(trainer: Trainer, path: str | Path, strict: bool) -> Loaded:
    """As `Trainer.load_weights`."""
    attempt = trainer.coordination.attempt
    found: list[Opened] = []

    def look() -> str:
        found.append(_opened(path))
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


def load_model(
    path: str | Path, model: nn.Module | Callable[[], nn.Module] | None = None
) -> nn.Module:
    """A model with the weights that a file or a checkpoint has, ready to predict.

        net = sp.load_model("runs/mnist", Net)  # or Net(width=64), or a function that makes it

    Files have names and numbers, and no code: nothing of them is run, and no class is imported
    because a file says so. No trainer and no other task is needed. To go on training, make a
    `Trainer` with the model and call its `load`.

    Args:
        path: What `Trainer.save`, `Trainer.save_weights` or `ModelCheckpoint` wrote, a run folder
            (the newest checkpoint is taken), a file of ``torch.save``, or a folder with the
            safetensors of Transformers or timm.
        model: A module, which gets the weights; or its class, or a function, that is called
            without arguments.

    Returns:
        The module, in eval mode, on the device and with the dtype that it was built with.

    Raises:
        UserError: The file cannot be read or was damaged, or does not fit the model, by name or by
            shape.
    """
    made = _made(path, model)
    net, found = unwrap(made), _opened(path)
    names = set(net.state_dict())
    tree = _unwrapped(found.trees[MODEL], names)
    _check_has_any(path, tree, names)
    load_whole(net, Saved({MODEL: tree}, partial(_section, found)), {}, names)
    return made.eval()


def _made(path: str | Path, model: Any) -> nn.Module:
    """The module that is given, or made by what is."""
    call = f"sp.load_model({str(path)!r}"
    if model is None or isinstance(model, str):
        raise UserError(
            f"{call}{'' if model is None else f', {model!r}'}): files have names and numbers, and "
            "no code to build a model with",
            f"Import the class and give it: {call}, Net), or {call}, Net(64)).",
        )
    made = model
    if callable(model) and not isinstance(model, nn.Module):
        try:
            signature(model).bind()
        except (TypeError, ValueError) as error:
            name = getattr(model, "__name__", describe(model))
            raise UserError(
                f"{call}, {name}): {error}", f"Give a module that is built: {call}, {name}(...))."
            ) from None
        made = model()
    if not isinstance(made, nn.Module):
        raise UserError(
            f"{call}, ...) got {describe(made)}", f"Give a module or its class: {call}, Net)."
        )
    if is_unmade(made):
        raise UserError(
            f"{call}, ...): the model was built on the meta device", "Build it without sp.meta()."
        )
    return made


def _opened(path: str | Path) -> Opened:
    """What is at a path, of whose model each file is what was written."""
    found = opened(_fetched(str(path)))
    found.verify(MODEL)
    return found


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
