"""Several data sets in one, in given shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from spartito.data.dataset import Dataset
from spartito.data.images.transforms import RandomTransform
from spartito.data.reading.collate import collate, join, take
from spartito.data.reading.order import Indices, permutation
from spartito.data.reading.passes import order_of
from spartito.data.reading.readers import Reading, make_reading
from spartito.data.source import BatchSource, Found, OrderedSource, Source
from spartito.errors import UserError
from spartito.numeric import is_whole

Size = int | Literal["shortest", "longest"]


@dataclass(frozen=True)
class Part:
    """One data set of a mixture.

    Attributes:
        name: As the user calls it.
        data: Its examples, and their order.
        count: How many of them a pass over the mixture has.
        first: The index in the mixture of its first example.
    """

    name: str
    data: Dataset
    count: int
    first: int

    @property
    def examples(self) -> int:
        """How many it has."""
        assert self.data.examples is not None
        return self.data.examples

    @property
    def repeats(self) -> int:
        """In how many of its own passes the examples of one pass over the mixture may lie."""
        return -(-self.count // self.examples) + 1

    def order(self, seed: int, epoch: int) -> Indices:
        """Its examples in pass ``epoch`` over the mixture, in their order, shape ``(count,)``.

        Its own passes go on from one pass over the mixture to the next, so that none of its
        examples comes twice before each came once. One that comes again has another index.
        """
        begin, end = epoch * self.count, (epoch + 1) * self.count
        found = []
        for repeat, own in enumerate(range(begin // self.examples, -(-end // self.examples))):
            start = own * self.examples
            rows = slice(max(begin - start, 0), min(end - start, self.examples))
            order = order_of(self.data, seed if self.data.seed is None else self.data.seed, own)
            whole = np.arange(self.examples) if order is None else order.numpy()
            found.append(self.first + repeat * self.examples + whole[rows])
        return np.concatenate(found)


@dataclass(frozen=True, eq=False)
class Mixture(BatchSource, OrderedSource):
    """Examples of several data sets, in given shares and in an order of their own.

    Args:
        parts: The data sets.
    """

    parts: tuple[Part, ...]
    _readings: dict[int, Reading] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        """How many examples a pass has."""
        return sum(part.count for part in self.parts)

    @property
    def shares(self) -> dict[str, float]:
        """The part of all examples that each has, by name."""
        return {part.name: part.count / len(self) for part in self.parts}

    @property
    def form(self) -> str:
        return "; ".join(
            f"{part.name}: {part.count} of {part.examples}, "
            f"shuffled={part.data.shuffled}, blocks={part.data.live}, seed={part.data.seed}"
            for part in self.parts
        )

    def order(self, seed: int, epoch: int) -> Indices:
        """As `OrderedSource.order`: each part in its own, drawn among the others."""
        owners = np.repeat(np.arange(len(self.parts)), [part.count for part in self.parts])
        owners = owners[permutation(len(owners), seed, epoch)]
        found = np.empty(len(owners), dtype=np.int64)
        for number, part in enumerate(self.parts):
            found[owners == number] = part.order(seed + 1 + number, epoch)
        return found

    def __getitem__(self, index: int) -> Any:
        """One example.

        Raises:
            CorruptSampleError: It cannot be read.
        """
        number = int(self._owners(np.array([index]))[0])
        part = self.parts[number]
        return self._reading(number).one(0, (index - part.first) % part.examples)

    def read_batch(self, indices: Sequence[int]) -> Found:
        """As `BatchSource.read_batch`: each part reads its examples together."""
        asked = np.asarray(indices, dtype=np.int64)
        owners = self._owners(asked)
        batches: list[Any] = []
        positions: list[int] = []
        corrupt: list[tuple[int, str]] = []
        for number in np.unique(owners).tolist():
            part, here = self.parts[number], np.flatnonzero(owners == number)
            own = (asked[here] - part.first) % part.examples
            found = self._read(number, own)
            messages = dict(found.corrupt)
            corrupt += [
                (int(index), messages[int(at)])
                for index, at in zip(asked[here], own, strict=True)
                if int(at) in messages
            ]
            if found.data is not None:
                batches.append(found.data)
                positions += here[found.kept].tolist()
        if not batches:
            return Found(None, [], corrupt)
        try:
            together = join(batches)
        except UserError as error:
            names = ", ".join(self.parts[number].name for number in np.unique(owners).tolist())
            raise UserError(
                f"the examples of {names} make no batch together: {str(error).splitlines()[0]}",
                "Bring them to one form, by .map on each before they are mixed.",
            ) from error
        rows = torch.as_tensor(positions)
        return Found(take(together, rows.argsort()), sorted(positions), corrupt)

    def describe(self) -> str:
        """What a pass reads of each part, a line each."""
        lines = []
        for part in self.parts:
            times = part.count / part.examples
            lines.append(
                f"{part.name}: {part.count / len(self):.1%} of a pass, {part.count:,} examples, "
                f"{times:.3g} times its {part.examples:,}"
            )
        return "\n".join(lines)

    def _owners(self, indices: Indices) -> Indices:
        """The number of the part that each example is of."""
        firsts = np.array([part.first for part in self.parts])
        return np.searchsorted(firsts, indices, side="right") - 1

    def _reading(self, number: int) -> Reading:
        if number not in self._readings:
            self._readings[number] = make_reading(self.parts[number].data, 0)
        return self._readings[number]

    def _read(self, number: int, own: Indices) -> Found:
        data = self.parts[number].data
        source: Any = data.source
        if data.gathers:
            return Found(source.gather(torch.from_numpy(own)), list(range(len(own))), [])
        return self._reading(number).many((0, own.tolist()))


def mix(
    parts: Mapping[str, Dataset],
    weights: Mapping[str, float] | None = None,
    *,
    size: Size = "shortest",
) -> Dataset:
    """Several data sets in one, in given shares.

    A pass has of each as much as its weight says, drawn among the others; weights that fit no whole
    numbers of examples are rounded. Each data set keeps its own order (``.shuffle`` it before) and
    goes on where the pass before ended: none of its examples comes twice before each came once. All
    of it follows from (seed, pass), the same at any number of workers and after a restart.

    Args:
        parts: Data sets without batches, by name; all have examples of one form.
        weights: How many examples each has beside the others, by name; None: as many as it has.
        size: How many examples a pass has: "shortest", until the first of them has all been seen,
            so that none comes twice in it; "longest", until all of them have; or their number.

    Returns:
        A data set whose ``source.shares`` and ``describe()`` say what a pass has of each.

    Raises:
        UserError: No data sets, other names, weights that are not above 0, a data set that comes
            in an order of its own, has batches, or transforms at random.
    """
    if not parts:
        raise UserError("nothing to mix", 'For example mix({"web": web, "code": code}).')
    for name, data in parts.items():
        _check(name, data)
    counts = {name: data.examples or 0 for name, data in parts.items()}
    asked = dict(counts if weights is None else weights)
    if asked.keys() != parts.keys():
        raise UserError(
            f"weights of {', '.join(asked)}, and data sets {', '.join(parts)}",
            "Give each data set its weight, by the same name.",
        )
    if wrong := [name for name, weight in asked.items() if not 0 < weight < math.inf]:
        raise UserError(
            f"the weight of {wrong[0]!r} is {asked[wrong[0]]!r}",
            "A weight is above 0; leave a data set out that is to have none.",
        )
    shares = {name: weight / sum(asked.values()) for name, weight in asked.items()}
    made, first = [], 0
    for name, count in _counted(shares, counts, size).items():
        part = Part(name, parts[name], count, first)
        first += part.repeats * part.examples
        made.append(part)
    threads = max(data.threads for data in parts.values())
    ahead = max(data.ahead for data in parts.values())
    return Dataset(Mixture(tuple(made))).prefetch(ahead, threads)


def _counted(shares: Mapping[str, float], counts: Mapping[str, int], size: Size) -> dict[str, int]:
    """How many examples of each a pass has: whole numbers, as near as they can be."""
    if size == "shortest":
        total = math.floor(min(counts[name] / share for name, share in shares.items()) + 1e-9)
    elif size == "longest":
        total = math.ceil(max(counts[name] / share for name, share in shares.items()) - 1e-9)
    elif is_whole(size) and size > 0:
        total = size
    else:
        raise UserError(f"size={size!r}", '"shortest", "longest", or a number of examples.')
    exact = {name: share * total for name, share in shares.items()}
    whole = {name: math.floor(number) for name, number in exact.items()}
    rest = sorted(exact, key=lambda name: whole[name] - exact[name])
    for name in rest[: total - sum(whole.values())]:
        whole[name] += 1
    if none := [name for name, count in whole.items() if not count]:
        raise UserError(
            f"a pass of {total} examples has none of {none[0]!r}, whose share is "
            f"{shares[none[0]]:.3g}",
            'Take more: size="longest", or a number.',
        )
    return whole


def _check(name: str, data: Any) -> None:
    if not isinstance(data, Dataset):
        raise UserError(
            f"{name!r} is a {type(data).__name__}",
            "Mix data sets of sp.data: sp.data.arrays(x, y).",
        )
    if data.batched or not isinstance(data.source, Source):
        raise UserError(
            f"{name!r} has batches, or comes as a stream",
            "Mix examples by index, and call .batch afterwards.",
        )
    if not data.examples:
        raise UserError(f"{name!r} has no examples")
    own = getattr(data.source, "collate", collate)
    if data.processes is not None or data.collate is not own or data.repeats != 1:
        raise UserError(
            f"{name!r} has worker processes, a collate function or repeats of its own",
            "Mix data sets without, and say them of the mixture.",
        )
    if any(isinstance(change, RandomTransform) for change in data.example_maps):
        raise UserError(
            f"{name!r} is changed at random", "Put random transforms behind sp.data.mix(...)."
        )
    if isinstance(data.source, OrderedSource):
        raise UserError(f"{name!r} is a mixture itself", "Mix all in one call.")
