"""Buffers that forward passes change: whether they are alike on all replicas, and made so.

A replica sees its own rows, so what a module gathers of them (the centre of its inputs, a
codebook, statistics of a norm of one's own) is another value on each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from spartito.accelerators import rounding_id
from spartito.collectives.collective import Collective
from spartito.engine.drift import different, drifted, moments, outliers
from spartito.engine.modules.batchnorm import SynchronizedForward, takes_statistics
from spartito.fingerprints import checksum
from spartito.names import listed

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
MOST = 5
"""Names in a message."""


def shared_buffers(
    model: nn.Module, with_synchronized: bool = True, without: Collection[int] = ()
) -> dict[str, Tensor]:
    """The buffers that are to be alike, by name.

    Args:
        model: Any.
        with_synchronized: Whether synchronized norms have the same statistics on all replicas.
        without: The ids of tensors to leave out.

    Returns:
        All but those that no checkpoint has, which may be caches, and the statistics of torch's
        norms that each replica takes for itself: they are averaged.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for path, module in model.named_modules():
        is_shared = with_synchronized and isinstance(module, SynchronizedForward)
        own = () if is_shared or not takes_statistics(module) else STATISTICS
        for name, buffer in module._buffers.items():
            if (
                buffer is not None
                and name not in module._non_persistent_buffers_set
                and name not in own
                and id(buffer) not in without
                and not buffer.is_meta
                and buffer.layout == torch.strided
            ):
                found.setdefault(id(buffer), (f"{path}.{name}".removeprefix("."), buffer))
    return dict(found.values())


def kept_buffers(model: nn.Module) -> set[str]:
    """The names of the buffers that checkpoints have: others may be caches."""
    return {
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    }


def caches(model: nn.Module) -> dict[str, Tensor | None]:
    """The buffers that no checkpoint has, by name; None for what is no floating number.

    Others are counted, or masks of the rows of each replica.
    """
    kept = kept_buffers(model)
    return {
        name: buffer if buffer is not None and buffer.is_floating_point() else None
        for path, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if (name := f"{path}.{key}".removeprefix(".")) not in kept
    }


def unlike_caches(group: Collective, buffers: dict[str, Tensor | None]) -> dict[str, list[int]]:
    """As `unlike`, of what no checkpoint has; all tasks call it.

    One that has another size elsewhere belongs to the rows there, as a mask of padded texts.

    Args:
        group: The tasks.
        buffers: As `caches` returns them.
    """
    if group.world_size == 1:
        return {}
    plain = {
        name: buffer
        for name, buffer in buffers.items()
        if buffer is not None and not buffer.is_meta and buffer.layout == torch.strided
    }
    device = next((buffer.device for buffer in plain.values()), torch.device("cpu"))
    same = group.all_gather(torch.tensor([len(buffers), rounding_id(device)]))
    if not buffers or len({tuple(each.tolist()) for each in same}) > 1:
        return {}  # processors of several kinds round differently
    mine = [
        (plain[name].numel(), checksum([plain[name]])) if name in plain else (-1, 0)
        for name in buffers
    ]
    found = [each.tolist() for each in group.all_gather(torch.tensor(mine))]
    others = {}
    for name, row in zip(buffers, zip(*found, strict=True), strict=True):
        sizes, sums = zip(*row, strict=True)
        if len({*sizes}) == 1 and (ranks := outliers(sums)):
            others[name] = ranks
    return others


@contextmanager
def watched(model: nn.Module) -> Iterator[set[str]]:
    """A forward pass; afterwards the set has the floating buffers that it has changed.

    Not those of which a checkpoint knows nothing and that it has replaced as a whole: caches.
    """
    kept, changed = kept_buffers(model), set[str]()
    floating = {n: each for n, each in model.named_buffers() if each.is_floating_point()}
    before = {name: each.clone() for name, each in floating.items()}  # norms note no new version
    yield changed
    for name, buffer in model.named_buffers():
        if (
            name in before
            and (buffer is floating[name] or name in kept)
            and not torch.equal(buffer, before[name])
        ):
            changed.add(name)


def unlike(group: Collective, buffers: dict[str, Tensor]) -> dict[str, list[int]]:
    """The ranks whose value of a buffer is not that of most, by its name; all tasks call it.

    Args:
        group: The tasks.
        buffers: As `shared_buffers` returns them, the same names on all.

    Returns:
        Only buffers that differ, and by more than rounding where processors round differently.
    """
    if group.world_size == 1 or not buffers:
        return {}
    tensors = list(buffers.values())
    mine = (checksum(tensors), rounding_id(tensors[0].device), sum(t.numel() for t in tensors))
    found = [each.tolist() for each in group.all_gather(torch.tensor(mine))]
    sums, rounds, sizes = zip(*found, strict=True)
    if not outliers(sums):
        return {}
    if len({*rounds}) > 1 and len({*sizes}) == 1:
        each = group.all_gather(torch.tensor(moments(tensors), dtype=torch.float64))
        if not any(drifted([(float(a), float(b)) for a, b in each])):
            return {}
    one_by_one = group.all_gather(torch.tensor([checksum([tensor]) for tensor in tensors]))
    values = zip(*(each.tolist() for each in one_by_one), strict=True)
    others = {name: outliers(row) for name, row in zip(buffers, values, strict=True)}
    return {name: ranks for name, ranks in others.items() if ranks}


def refuse(group: Collective, others: dict[str, list[int]]) -> None:
    """Raise `DriftedError` that names the tasks and buffers of `unlike`, if there are any."""
    if others:
        raise different(
            group,
            sorted({rank for ranks in others.values() for rank in ranks}),
            f"has other values in {in_words(others)} than",
            "The forward pass changes them, from the rows of each replica. Compute them from all "
            "rows (strategy.reduce), or leave deterministic=True out: then all replicas take the "
            "first one's at the end of each epoch.",
        )


@torch.no_grad()
def take_first(group: Collective, buffers: list[Tensor]) -> None:
    """Give all tasks the first one's values, in place; all call it.

    Raises `DriftedError` where a buffer has another shape elsewhere.
    """
    sizes = group.all_gather(torch.tensor([each.numel() for each in buffers]))
    if ranks := outliers([tuple(each.tolist()) for each in sizes]):
        raise different(
            group,
            ranks,
            "has buffers of other shapes than",
            "Register what is a cache with persistent=False: it is each replica's own.",
        )
    for buffer in buffers:
        buffer.copy_(group.broadcast(buffer.detach().clone()))


def in_words(names: Collection[str]) -> str:
    """Some of these buffers."""
    return f"the buffer{'s'[: len(names) != 1]} {listed(sorted(map(repr, names)), MOST)}"
