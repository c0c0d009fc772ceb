"""Texts as sequences of characters, to learn which one comes next.

The text that ships with the package, six tragedies by Shakespeare, is in the public domain; where
it comes from stands in ``files/README.md``.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from os import PathLike
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from spartito.data.dataset import Dataset
from spartito.errors import UserError
from spartito.storage.whole_files import read_whole

FILE = "files/shakespeare.txt.gz"
VALIDATION = 0.1
"""The part of a text, its end, that is kept for validation."""


class Windows:
    """Examples that are equally long parts of one sequence, each beside itself moved by one.

    Args:
        tokens: The sequence, ``(tokens,)`` of any type of whole numbers but int64.
        length: Tokens of an example; the next example begins behind it.
    """

    def __init__(self, tokens: Tensor, length: int) -> None:
        self._rows = tokens.unfold(0, length + 1, length)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self._rows[index].long()
        return row[:-1], row[1:]

    def gather(self, indices: slice | Tensor) -> tuple[Tensor, Tensor]:
        """The examples at ``indices``, copied: ``(examples, length)`` int64 each."""
        rows = self._rows[indices].long()
        return rows[:, :-1], rows[:, 1:]


def characters(
    file: str | PathLike[str] | None = None,
    subset: Literal["training", "validation"] = "training",
    context: int = 64,
) -> Dataset:
    """Parts of a text, and for each character the one that comes next.

    Args:
        file: The path or URL of a text in UTF-8; None takes six tragedies by Shakespeare, which
            come with the package.
        subset: "training" has the first nine tenths of the text, "validation" the last one.
        context: Characters of an example.

    Returns:
        Examples ``(x, y)``, both ``(context,)`` int64: indices into ``.classes``, the sorted
        characters of the whole text. ``y`` is ``x`` moved on by one character.

    Raises:
        UserError: No such file, one that is not UTF-8, or one that is too short.
    """
    whole, name = _read(file)
    points = np.frombuffer(whole.encode("utf-32-le"), np.uint32)
    known, codes = np.unique(points, return_inverse=True)
    small = np.uint8 if len(known) <= 256 else np.int32
    tokens = torch.from_numpy(codes.astype(small))
    first = len(tokens) - int(len(tokens) * VALIDATION)
    if len(tokens) - first <= context:
        raise UserError(
            f"{name} has {len(tokens)} characters, too few for examples of {context}",
            f"Give {int((context + 1) / VALIDATION)} or more: the last tenth validates.",
        )
    part = tokens[:first] if subset == "training" else tokens[first:]
    return replace(Dataset(Windows(part, context)), classes=tuple(map(chr, known.tolist())))


def encode(text: str, alphabet: Sequence[str]) -> Tensor:
    """The indices of characters.

    Args:
        text: What is to be encoded.
        alphabet: All characters there are: the ``classes`` of `characters`.

    Returns:
        ``(characters,)`` int64, one for each.

    Raises:
        UserError: A character that is not in the alphabet.
    """
    index = {character: number for number, character in enumerate(alphabet)}
    if unknown := sorted(set(text) - set(index)):
        raise UserError(
            f"{unknown[0]!r} does not occur in the text that was learned",
            f"It has: {''.join(alphabet).strip()}",
        )
    return torch.tensor([index[character] for character in text], dtype=torch.int64)


def decode(tokens: Tensor, alphabet: Sequence[str]) -> str:
    """The characters with these indices.

    Args:
        tokens: ``(tokens,)`` of whole numbers.
        alphabet: All characters there are.

    Returns:
        The text.
    """
    return "".join(alphabet[token] for token in tokens.tolist())


def _read(file: Any) -> tuple[str, str]:
    """A text, and what to call it."""
    if file is None:
        packed = (files("spartito.data") / FILE).read_bytes()
        return gzip.decompress(packed).decode("ascii"), "the text of the package"
    try:
        return read_whole(file).decode("utf-8"), str(file)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is no text in UTF-8: byte {error.start} is {error.object[error.start]:#04x}",
            "Save it as UTF-8, or give another file.",
        ) from error
