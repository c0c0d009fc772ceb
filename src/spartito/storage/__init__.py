"""Files that are whole or not there: atomic writes, manifests, tensors without pickle."""

from typing import TYPE_CHECKING

from spartito._lazy import attach as _attach

if TYPE_CHECKING:
    from spartito.storage.atomic import (
        Manifest,
        read_manifest,
        replace_durably,
        sweep,
        verify,
        write_directory,
        write_file_atomically,
    )
    from spartito.storage.tensors import load_tensors, pack_state, save_tensors, unpack_state

_ATOMIC, _TENSORS = "spartito.storage.atomic", "spartito.storage.tensors"  # only these need torch

__getattr__ = _attach(
    __name__,
    {
        "Manifest": _ATOMIC,
        "load_tensors": _TENSORS,
        "pack_state": _TENSORS,
        "read_manifest": _ATOMIC,
        "replace_durably": _ATOMIC,
        "save_tensors": _TENSORS,
        "sweep": _ATOMIC,
        "unpack_state": _TENSORS,
        "verify": _ATOMIC,
        "write_directory": _ATOMIC,
        "write_file_atomically": _ATOMIC,
    },
)

__all__ = [
    "Manifest",
    "load_tensors",
    "pack_state",
    "read_manifest",
    "replace_durably",
    "save_tensors",
    "sweep",
    "unpack_state",
    "verify",
    "write_directory",
    "write_file_atomically",
]
