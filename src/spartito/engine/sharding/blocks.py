"""A model cut into blocks, and blocks into shards. Pure, but for the tensors' shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from torch import nn

GRAIN = 16
"""Shards have a multiple of so many elements: a cache line of the smaller types and more."""


@dataclass(frozen=True, slots=True)
class Section:
    """Elements ``start`` to ``stop`` of parameter number ``parameter``, in row-major order.

    ``offset`` is where they begin in what they lie in.
    """

    parameter: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Parameters of these sizes, one after the other, cut into ``shards`` of ``length`` each."""

    sizes: tuple[int, ...]
    shards: int

    @property
    def length(self) -> int:
        """Elements of a shard: the last ones may have some that are nobody's."""
        grains = max(1, -(-sum(self.sizes) // (self.shards * GRAIN)))
        return grains * GRAIN

    def sections(self, first: int, last: int) -> list[Section]:
        """What lies from element ``first`` to ``last`` of the whole; offsets count from there."""
        ends = list(accumulate(self.sizes))
        found = []
        for number, (size, end) in enumerate(zip(self.sizes, ends, strict=True)):
            begin = end - size
            start, stop = max(first, begin), min(last, end)
            if start < stop or (size == 0 and first <= begin < last):
                found.append(Section(number, start - begin, stop - begin, start - first))
        return found

    def shard(self, rank: int) -> list[Section]:
        """The sections of a rank's shard."""
        return self.sections(rank * self.length, (rank + 1) * self.length)


@dataclass(frozen=True, eq=False)
class Members:
    """Parameters that are made whole together, while ``module`` computes."""

    module: nn.Module
    parameters: tuple[nn.Parameter, ...]


def divide(model: nn.Module, least: int, taken: Iterable[int] = ()) -> list[Members]:
    """Cut a model into blocks by size.

    A module whose parameters weigh ``least`` bytes is a block, with what its submodules leave that
    weigh less. A module of torch's own that computes is never cut: it may use the parameters of
    its submodules by itself. A parameter that several modules have belongs to the model.

    Args:
        model: Any module.
        least: Bytes.
        taken: The ids of parameters that are elsewhere.

    Returns:
        The blocks in the order of the modules; each has parameters of one dtype and either all or
        none of them learn.
    """
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    left = set(taken) | {key for key, count in uses.items() if count > 1}
    found: list[Members] = []

    def walk(module: nn.Module) -> None:
        position = len(found)
        if not _is_whole(module):
            for child in _called(module):
                if sum(p.nbytes for p in child.parameters() if id(p) not in left) >= least:
                    walk(child)
        if module is model:
            left.difference_update(set(uses) - set(taken))
            left.update(id(p) for block in found for p in block.parameters)
        rest = [p for p in module.parameters() if id(p) not in left]
        left.update(map(id, rest))
        kinds = dict.fromkeys((p.dtype, p.requires_grad) for p in rest)
        found[position:position] = [
            Members(module, tuple(p for p in rest if (p.dtype, p.requires_grad) == kind))
            for kind in kinds
        ]

    walk(model)
    return found


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The submodules that can be called: a ModuleList stands for those in it."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _called(child)
        else:
            yield child


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def _is_whole(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS)
