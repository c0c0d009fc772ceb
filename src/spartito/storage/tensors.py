"""Tensors in safetensors files, and nested state as JSON beside them; never a pickle."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from spartito.errors import UserError
from spartito.storage.stream import CODES, METADATA, Entry, in_order, write_stream

Json: TypeAlias = Any
"""What the `json` module reads and writes."""

ALIASES = "aliases"
"""Where the head of a file has the names that stand for others."""


def save_tensors(tensors: Mapping[str, torch.Tensor], file: str | os.PathLike[str]) -> None:
    """Write ``tensors`` of any shape, stride and device into one safetensors file.

    Tensors that are the same memory (tied weights) are stored once; the other names go into the
    file's metadata. Raises `UserError` for a sparse tensor, a dtype that the format lacks, or a
    file that cannot be written.
    """
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    aliases = same_tensors(tensors)
    stored = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    entries = in_order(Entry(n, tuple(t.shape), t.dtype) for n, t in stored.items())
    write_stream(file, entries, (stored[entry.name] for entry in entries), metadata_with(aliases))


def same_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The names of tensors that are the same memory as an earlier one (tied), with its name."""
    first: dict[tuple[Any, ...], str] = {}
    owners = {name: first.setdefault(_identity(name, t), name) for name, t in tensors.items()}
    return {name: owner for name, owner in owners.items() if owner != name}


def metadata_with(aliases: Mapping[str, str]) -> dict[str, str]:
    """The head of a file in which these names stand for others."""
    return {"format": "pt"} | ({ALIASES: json.dumps(aliases)} if aliases else {})


def load_tensors(file: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The tensors that `save_tensors`, or any other program, wrote to ``file``, on the CPU.

    Names that were tied are one tensor again. Raises `UserError` when it is no such file.
    """
    try:
        with safe_open(os.fspath(file), framework="pt") as content:
            metadata = content.metadata() or {}
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        aliases = json.loads(metadata.get(ALIASES, "{}"))
        return tensors | {name: tensors[owner] for name, owner in aliases.items()}
    except FileNotFoundError:
        raise UserError(f"{file} does not exist") from None
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{file} is not a safetensors file that can be read: {error}") from error


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that the format does not hold."""
    if name == METADATA:
        raise UserError(f"A tensor is called {name!r}, which the format keeps for itself")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
        raise UserError(f"{name} is a {kind} tensor, and only dense ones with values are saved")
    if tensor.dtype not in CODES:
        raise UserError(f"{name} is of {tensor.dtype}, which the safetensors format does not hold")


def check_storable(model: torch.nn.Module) -> None:
    """Refuse a model of which no checkpoint could be written, before it has trained for hours."""
    persistent = (
        (f"{path}.{name}" if path else name, buffer)
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    )
    for name, tensor in (*model.named_parameters(), *persistent):
        if tensor.dtype not in CODES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                f"{name} is of {kind}, which no checkpoint can hold",
                "Take complex64, or keep it as real numbers: torch.view_as_real(tensor), and "
                "torch.view_as_complex in forward().",
            )


def _identity(name: str, tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors exactly when they are the same elements of the same memory."""
    if tensor.numel() == 0:
        return (name,)
    memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (*memory, tuple(tensor.shape), tensor.stride())


def pack_state(state: Any, name: str = "") -> tuple[Json, dict[str, torch.Tensor]]:
    """Split nested ``state`` into a JSON tree and its tensors, named by their path of keys.

    Dicts (with str, int, bool, float or None as keys), lists, tuples, tensors, str, int, float
    (NaN and infinities too), bool and None come back from `unpack_state` equal and of the same
    kind; subclasses come back as these. Anything else is a `UserError` that names its path,
    which starts with ``name``.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _pack(state, (name,), tensors), tensors


def unpack_state(tree: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What `pack_state` was given. Raises `UserError` for a tree that it did not write."""
    try:
        return _unpack(tree, tensors)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"The saved state does not fit together: {error}") from error


def copied(state: Any) -> Any:
    """A copy of nested ``state``, which `pack_state` takes, that shares no memory with it."""
    tree, tensors = pack_state(state)
    return unpack_state(tree, {name: tensor.clone() for name, tensor in tensors.items()})


# A JSON object whose one key is a mark stands for something that JSON lacks. A dict that could
# be mistaken for it is written as a list of pairs.
_TENSOR, _TUPLE, _FLOAT, _PAIRS = "$tensor", "$tuple", "$float", "$dict"
_MARKS = frozenset({_TENSOR, _TUPLE, _FLOAT, _PAIRS})


def is_mark(tree: Json) -> bool:
    """Whether a JSON object stands for something that JSON lacks."""
    return isinstance(tree, dict) and len(tree) == 1 and not _MARKS.isdisjoint(tree)


def _pack(value: Any, path: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> Json:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, torch.Tensor):
        name = _free_name(".".join(path[1:]) or "value", tensors)
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, list):
        return [_pack(v, (*path, str(i)), tensors) for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {_TUPLE: [_pack(v, (*path, str(i)), tensors) for i, v in enumerate(value)]}
    if isinstance(value, dict):
        return _pack_dict(value, path, tensors)
    raise UserError(
        f"{_label(path)} is a {type(value).__name__}, which cannot be saved",
        "State is made of dicts, lists, tuples, tensors, numbers, strings, bools and None.",
    )


def _pack_dict(
    value: dict[Any, Any], path: tuple[str, ...], tensors: dict[str, torch.Tensor]
) -> Json:
    for key in value:
        if not (key is None or isinstance(key, str | int | float)):
            raise UserError(
                f"{_label(path)} has the key {key!r} of type {type(key).__name__}, "
                "which cannot be saved",
                "Keys are strings, numbers, bools or None.",
            )
    items = [(key, _pack(v, (*path, str(key)), tensors)) for key, v in value.items()]
    if all(isinstance(key, str) for key in value) and not _MARKS & value.keys():
        return {str.__str__(key): packed for key, packed in items}
    return {_PAIRS: [[_pack(key, path, tensors), packed] for key, packed in items]}


def _label(path: tuple[str, ...]) -> str:
    root, *rest = path
    return ".".join([root, *rest] if root else rest) or "The state"


def _unpack(tree: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(tree, list):
        return [_unpack(v, tensors) for v in tree]
    if not isinstance(tree, dict):
        return tree
    match list(tree.items()):
        case [(mark, content)] if mark in _MARKS:
            return _unpack_mark(mark, content, tensors)
        case items:
            return {key: _unpack(v, tensors) for key, v in items}


def _unpack_mark(mark: str, content: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    if mark == _TENSOR:
        return tensors[content]
    if mark == _TUPLE:
        return tuple(_unpack(v, tensors) for v in content)
    if mark == _FLOAT:
        return float(content)
    return {_unpack(key, tensors): _unpack(v, tensors) for key, v in content}


def _free_name(wish: str, taken: Mapping[str, Any]) -> str:
    """``wish``, in valid UTF-8, with a number behind it when it is taken."""
    wish = wish.encode(errors="replace").decode()

    def names() -> Iterator[str]:
        yield wish
        number = 2
        while True:
            yield f"{wish}#{number}"
            number += 1

    return next(name for name in names() if name not in taken and name != METADATA)
