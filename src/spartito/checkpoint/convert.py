"""Checkpoints as other files, and several as one: tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from spartito.checkpoint.cuts import Box
from spartito.checkpoint.foreign_files import MODEL, PLAIN, Opened
from spartito.checkpoint.manager import write_trees
from spartito.checkpoint.stored_parts import SUFFIX, Slot, Tensors, arrange, write_slots
from spartito.errors import UserError
from spartito.storage.atomic import (
    check_not_protected,
    folder_beside,
    replace_durably,
    write_directory,
)

Read = Callable[[str], Tensor]

FORMS = (SUFFIX, *PLAIN)
"""How the name of a file with a model may end."""


def convert(found: Opened, out: Path) -> str:
    """Write what was found in another form, which the name of ``out`` says.

    Args:
        found: A checkpoint or a model.
        out: ``.safetensors``: its model in one such file. ``.pt``, ``.pth``, ``.bin``: a torch
            state_dict, for which all of the model is in memory at once. A name without a suffix: a
            checkpoint's directory, each section in one file.

    Returns:
        What was written, in a sentence.

    Raises:
        UserError: If a file has changed, or ``out`` exists, or cannot be written.
    """
    _check_free(out)
    if out.suffix:
        model = found.model
        found.verify(MODEL)
        return write_model(out, model, model.read)
    found.verify()
    with write_directory(out, found.about) as new:
        for section, tensors in found.sections.items():
            if tensors.names:
                _write_file(new / f"{section}{SUFFIX}", tensors, tensors.read)
        write_trees(new, found.trees)
    sections = ", ".join(found.trees)
    return f"{out}: a checkpoint with {sections}, each in one file"


def average(found: Sequence[Opened], out: Path) -> str:
    """Write the mean of several models; each counts the same.

    Floating tensors are added up in fp64 (complex ones in complex128) and get their own dtype
    again. Integers and bools, as BatchNorm's counters of batches, are those of the last model.

    Args:
        found: Two or more, of one model.
        out: As in `convert`; a directory gets the section "model" alone.

    Returns:
        What was written, in a sentence.

    Raises:
        UserError: If they are of different models, a file has changed, or ``out`` cannot be
            written.
    """
    _check_free(out)
    if len(found) < 2:
        raise UserError(f"the average of {len(found)} checkpoint", "Name two or more.")
    first, *others = found
    for other in others:
        _check_alike(first, other)
    for each in found:
        each.verify(MODEL)
    read = partial(_mean, [each.model for each in found])
    if out.suffix:
        return write_model(out, first.model, read)
    about = {"average_of": [str(each.path) for each in found]}
    with write_directory(out, about) as new:
        _write_file(new / f"{MODEL}{SUFFIX}", first.model, read)
        write_trees(new, {MODEL: first.trees[MODEL]})
    return f"{out}: a checkpoint with the model alone"


def _mean(models: Sequence[Tensors], name: str) -> Tensor:
    dtype = models[-1].dtype(name)
    if not (dtype.is_floating_point or dtype.is_complex):
        return models[-1].read(name)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    total = torch.zeros(models[0].shape(name), dtype=wide)
    for model in models:
        total += model.read(name).to(wide)
    return (total / len(models)).to(dtype)


def _check_alike(one: Opened, other: Opened) -> None:
    mine, theirs = (
        {name: (each.model.shape(name), each.model.dtype(name)) for name in each.model.names}
        for each in (one, other)
    )
    for name in [*mine, *theirs]:
        if mine.get(name) != theirs.get(name):
            raise UserError(
                f"{name} is {_kind(mine, name)} in {one.path} and {_kind(theirs, name)} in "
                f"{other.path}",
                "Average checkpoints of one model.",
            )
    if dict(one.model.aliases) != dict(other.model.aliases):
        raise UserError(
            f"{one.path} and {other.path} do not have the same tied tensors",
            "Average checkpoints of one model.",
        )


def _kind(of: Mapping[str, tuple[tuple[int, ...], torch.dtype]], name: str) -> str:
    shape, dtype = of.get(name, ((), None))
    return "missing" if dtype is None else f"{shape} {str(dtype).removeprefix('torch.')}"


def _check_free(out: Path) -> None:
    if out.exists():
        raise UserError(f"{out} exists", "Name another, or remove it first.")
    if out.suffix:
        check_form(out)


def check_form(out: Path) -> None:
    """Refuse a file's name that says no form.

    Args:
        out: Where a model is to be written.

    Raises:
        UserError: Its suffix is none of `FORMS`.
    """
    if out.suffix not in FORMS:
        raise UserError(
            f"{out.name} ends with {out.suffix or 'no suffix'}, which names no form of a model",
            f"End it with {SUFFIX}, or as torch.save's files with {', '.join(PLAIN)}.",
        )


def write_model(out: Path, tensors: Tensors, read: Read) -> str:
    """Write a model into one file, in place of one that is there.

    Args:
        out: The file; its name says the form.
        tensors: What is written.
        read: Gives the values of each.

    Returns:
        What was written, in a sentence.

    Raises:
        UserError: It cannot be written.
    """
    if out.suffix == SUFFIX:
        _whole_file(out, lambda new: _write_file(new, tensors, read))
        return f"{out}: {len(tensors.names)} tensors in one safetensors file"
    # A view of a mapped file would be written with all of its file.
    values = {name: read(name).clone() for name in tensors.names if name not in tensors.aliases}
    state = {name: values[tensors.aliases.get(name, name)] for name in tensors.names}
    _whole_file(out, lambda new: torch.save(state, new))
    return f"{out}: {len(state)} tensors, a state_dict for torch.load"


def _whole_file(out: Path, write: Callable[[Path], None]) -> None:
    """Have ``out`` appear when all is in it."""
    check_not_protected(out)
    try:
        with folder_beside(out) as folder:
            write(folder / out.name)
            replace_durably(folder / out.name, out)
    except (OSError, RuntimeError) as error:  # torch's own writer has RuntimeErrors
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{out} cannot be written: {reason}",
            "Name a folder that this process may write to, with space on its disk.",
        ) from error


def _write_file(file: Path, tensors: Tensors, read: Read) -> None:
    stored = [name for name in tensors.names if name not in tensors.aliases]
    slots, _, _ = arrange(_whole_slot(tensors, name) for name in stored)
    write_slots(file, slots, (read(slot.name) for slot in slots), tensors.aliases)


def _whole_slot(tensors: Tensors, name: str) -> Slot:
    shape = tensors.shape(name)
    return Slot(name, shape, tensors.dtype(name), Box.all_of(shape))
