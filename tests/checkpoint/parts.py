"""Files of parts as tests write them: each task's own, without the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from spartito.checkpoint.cuts import Box
from spartito.checkpoint.stored_parts import Slot, arrange, file_name, write_slots


@dataclass(frozen=True)
class Part:
    """A box of a whole tensor, with its values: what one task has of it.

    Args:
        slot: Which box of which tensor.
        tensor: The values, of the box's shape, any strides, on any device.
    """

    slot: Slot
    tensor: Tensor

    @classmethod
    def of(cls, name: str, tensor: Tensor, shape: Sequence[int], box: Box) -> Part:
        """The part of the tensor ``name``, which is ``shape`` as a whole."""
        return cls(Slot(name, tuple(shape), tensor.dtype, box), tensor)


def write_parts(
    directory: Path,
    section: str,
    writer: tuple[int, int],
    parts: Sequence[Part],
    aliases: Mapping[str, str] | None = None,
) -> Path:
    """Write one task's file of a section.

    Args:
        directory: That of the checkpoint.
        section: "model", "optimizer", ...
        writer: (index, count) of the files of the section.
        parts: What this file holds.
        aliases: Names that stand for others (tied weights).

    Returns:
        The file.
    """
    file = directory / file_name(section, writer[0] + 1, writer[1])
    values = {part.slot: part.tensor for part in parts}
    slots, _, _ = arrange(values)
    write_slots(file, slots, (values[slot] for slot in slots), aliases or {})
    return file
