"""Values of a device in the host's memory: one copy for all of them, since each waits for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from spartito.accelerators import wide
from spartito.collectives.collective import Number as Number
from spartito.data.reading.collate import leaves


def read(numbers: Sequence[Number]) -> list[float]:
    """Numbers that the host may not know yet.

    Args:
        numbers: Floats, and tensors of one element.

    Returns:
        All of them as floats, with one wait for the device.
    """
    several = sum(isinstance(number, Tensor) for number in numbers) > 1
    return [float(number) for number in (on_host(list(numbers)) if several else numbers)]


def added(total: Number, more: Number) -> Number:
    """The sum of two numbers, in fp64.

    Args:
        total: A number, or what this function returned: a tensor is added to in place.
        more: What comes to it.

    Returns:
        A float where the host knows both, else a tensor of the caller's own.
    """
    if not isinstance(more, Tensor):
        return total + more
    return total.add_(more) if isinstance(total, Tensor) else wide(more) + total


def on_host(tree: Any) -> Any:
    """Tensors in the host's memory.

    Args:
        tree: Tensors in lists, tuples and mappings of any depth, and anything beside them.

    Returns:
        The same with all tensors in the host's memory, with one wait for each device.
    """
    there = [tensor for tensor in leaves(tree) if not tensor.is_cpu]
    if not there:
        return tree
    of_devices: dict[torch.device, list[Tensor]] = {}
    for tensor in there:
        of_devices.setdefault(tensor.device, []).append(tensor.detach())
    found = {device: iter(_copied(tensors)) for device, tensors in of_devices.items()}
    return _replaced(tree, found)


def kept_on_host(tensor: Tensor) -> Tensor:
    """A tensor that seldom changes, in the host's memory.

    Args:
        tensor: As the weights of a loss's classes.

    Returns:
        The same values, which are read once, and again where somebody has written to it.
    """
    if tensor.is_cpu or tensor.is_inference():  # of those torch does not tell who has written
        return tensor.detach().cpu()
    found = _kept.get(tensor)
    if found is None or found[0] != tensor._version:
        _kept[tensor] = found = tensor._version, tensor.detach().cpu()
    copy: Tensor = found[1]
    return copy


_kept: Any = WeakTensorKeyDictionary()


def _copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one device, in the host's memory."""
    if len(tensors) == 1:
        return [tensors[0].cpu()]
    flat = [tensor.resolve_conj().reshape(-1).view(torch.uint8) for tensor in tensors]
    parts = torch.cat(flat).cpu().split([part.numel() for part in flat])
    return [  # each a copy: among the others it is not aligned
        part.clone().view(tensor.dtype).reshape(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def _replaced(tree: Any, found: Mapping[torch.device, Iterator[Tensor]]) -> Any:
    if isinstance(tree, Tensor):
        return tree if tree.is_cpu else next(found[tree.device])
    if isinstance(tree, Mapping):
        return {name: _replaced(part, found) for name, part in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)([_replaced(part, found) for part in tree])
    return tree
