"""A model cut into blocks, and blocks into shards. Pure, but for the tensors' shapes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import prod

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


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Parameters of these shapes, of which each shard has the same number of rows (dim 0).

    As torch's FSDP2 cuts them. Shards lie one after the other in a flat tensor: of each parameter
    ``lengths`` elements, of which the last shards may have some that are nobody's.
    """

    shapes: tuple[tuple[int, ...], ...]
    shards: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return tuple(map(prod, self.shapes))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Elements of each parameter in a shard."""
        return tuple(-(-shape[0] // self.shards) * prod(shape[1:]) for shape in self.shapes)

    @property
    def length(self) -> int:
        """Elements of a shard."""
        return sum(self.lengths)

    def shard(self, rank: int) -> list[Section]:
        """The sections of a rank's shard."""
        found, offset = [], 0
        for number, (size, length) in enumerate(zip(self.sizes, self.lengths, strict=True)):
            start, stop = (min(each * length, size) for each in (rank, rank + 1))
            if start < stop:
                found.append(Section(number, start, stop, offset))
            offset += length
        return found


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


def units(model: nn.Module, least: int) -> list[Members]:
    """As `divide`, where all parameters of a block become whole by one call.

    A parameter that several blocks use belongs to the block around them, with all that is beside
    it: their modules are no blocks then.

    Args:
        model: Any module.
        least: Bytes.

    Returns:
        The blocks, children before parents, the model last, which may have no parameters.
    """
    tops = {block.module for block in divide(model, least)} | {model}
    while True:
        owners = _owners(model, tops)
        using: dict[nn.Parameter, set[nn.Module]] = {}
        for module, top in owners.items():
            for parameter in module.parameters(recurse=False):
                using.setdefault(parameter, set()).add(top)
        apart = {top for found in using.values() if len(found) > 1 for top in found} - {model}
        if not apart:
            break
        tops -= apart
    found = {module: [p for p, (top,) in using.items() if top is module] for module in tops}
    order = [module for module in model.modules() if module in tops]
    return [Members(module, tuple(found[module])) for module in reversed(order)]


def _owners(model: nn.Module, tops: Collection[nn.Module]) -> dict[nn.Module, nn.Module]:
    """The block of each module: itself, or the nearest one around it."""
    found: dict[nn.Module, nn.Module] = {}

    def walk(module: nn.Module, top: nn.Module) -> None:
        if module not in found:
            found[module] = module if module in tops else top
            for child in module.children():
                walk(child, found[module])

    walk(model, model)
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
