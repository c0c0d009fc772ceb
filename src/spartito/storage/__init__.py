"""Files that are whole or not there: atomic writes, manifests, tensors without pickle."""

from spartito.storage.atomic import (
    Manifest,
    read_manifest,
    sweep,
    verify,
    write_directory,
    write_file_atomically,
)
from spartito.storage.tensors import load_tensors, pack_state, save_tensors, unpack_state

__all__ = [
    "Manifest",
    "load_tensors",
    "pack_state",
    "read_manifest",
    "save_tensors",
    "sweep",
    "unpack_state",
    "verify",
    "write_directory",
    "write_file_atomically",
]
