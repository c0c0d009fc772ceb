"""The machines of a plan: how many of which kind, and the line between them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from spartito.errors import UserError
from spartito.launch.lines.line import Link
from spartito.names import nearest, plural

_BYTES = {"": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]B)")
_RATE = re.compile(r"(\d+(?:\.\d+)?)/(hour|day|week|month|year)")
_SECONDS = {"hour": 3600.0, "day": 86400.0, "week": 604800.0, "month": 2.63e6, "year": 3.156e7}
EXAMPLE = (
    "As machines: {big: {count: 4, cores: 16, memory: 64GB, price: 0.8}}, link: 10gbit, workers: 2."
)


@dataclass(frozen=True, slots=True)
class Kind:
    """Machines that are alike.

    Attributes:
        name: What the user calls them.
        count: How many there are.
        cores: Of each.
        memory: Bytes of each.
        price: Of one for an hour, in any currency.
        speed: Of a core, in terms of the machine where the profile was made.
    """

    name: str
    count: int
    cores: int
    memory: float
    price: float = 0.0
    speed: float = 1.0

    def __post_init__(self) -> None:
        """Refuse machines that cannot be."""
        for name in ("count", "cores", "memory", "speed"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise UserError(f"{self.name}: {name} is {value!r}", "It is a number above 0.")
        if self.price < 0 or not math.isfinite(self.price):
            raise UserError(f"{self.name}: price is {self.price!r}", "It is 0 or more an hour.")


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a job would run on.

    Attributes:
        kinds: Its machines.
        workers: Tasks that compute, on each machine.
        link: The line of each machine to all others; None inside of one machine.
        ps: Parameter servers, for the strategy that has them.
        shared: Whether the machines are network namespaces of one, whose cores and memory each
            kind names, and all of them use.
    """

    kinds: tuple[Kind, ...]
    workers: int
    link: Link | None = None
    ps: int = 1
    shared: bool = False

    def __post_init__(self) -> None:
        """Refuse several machines without a line."""
        for name in ("workers", "ps"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)} is less than 1")
        if self.machines > 1 and self.link is None:
            raise UserError(
                f"{self.machines} machines, and no line between them", "Add --link 1gbit."
            )

    @property
    def machines(self) -> int:
        """How many there are."""
        return sum(kind.count for kind in self.kinds)

    @property
    def tasks(self) -> int:
        """All tasks that compute."""
        return self.machines * self.workers

    @property
    def cores(self) -> int:
        """Of the machine with the fewest."""
        return min(kind.cores for kind in self.kinds)

    @property
    def beside(self) -> int:
        """Tasks that compute on the same cores: those of one machine."""
        return self.tasks if self.shared else self.workers

    @property
    def turns(self) -> float:
        """How many machines share a core: 1, but for namespaces of one."""
        return max(1.0, self.machines / self.cores) if self.shared else 1.0

    @property
    def slowest(self) -> float:
        """The speed of the slowest kind."""
        return min(kind.speed for kind in self.kinds)

    @property
    def mean_speed(self) -> float:
        """The mean speed of all machines."""
        return sum(kind.speed * kind.count for kind in self.kinds) / self.machines

    @property
    def memory(self) -> float:
        """Bytes for each task, where there are the fewest."""
        return min(kind.memory for kind in self.kinds) / self.beside

    @property
    def price(self) -> float:
        """Of all machines for an hour."""
        return sum(kind.price * kind.count for kind in self.kinds)

    @property
    def threads(self) -> int:
        """That each task computes with."""
        return max(1, self.cores // self.beside)

    def alone(self) -> Cluster:
        """What a strategy of one process has of it: its fastest machine."""
        fastest = max(self.kinds, key=lambda kind: kind.speed * kind.cores)
        return replace(self, kinds=(replace(fastest, count=1),), workers=1)

    def one_more(self) -> Cluster:
        """The same with one more machine of the first kind; on one machine with one more worker."""
        if self.machines == 1:
            return replace(self, workers=self.workers + 1)
        first, *others = self.kinds
        return replace(self, kinds=(replace(first, count=first.count + 1), *others))

    @property
    def spoken(self) -> str:
        """As a sentence says it: ``4 machines with 2 workers each at 1 Gbit/s``."""
        each = plural(self.workers, "worker")
        if self.machines == 1:
            return f"{each} on one machine with {plural(self.cores, 'core')}"
        assert self.link is not None, "checked above"
        return f"{self.machines} machines with {each} each at {self.link.spoken}"

    @classmethod
    def read(cls, path: Path, workers: int | None, ps: int, cores: int, memory: float) -> Self:
        """The cluster that a YAML file describes.

        Args:
            path: With ``machines``, ``link`` and ``workers``.
            workers: Of each machine, where ``--workers`` says so.
            ps: Parameter servers.
            cores: Of machines for which the file says nothing.
            memory: Likewise.

        Returns:
            The cluster.

        Raises:
            UserError: The file is no such description.
        """
        import yaml

        try:
            found = yaml.safe_load(path.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"--on {path} cannot be read: {error}", EXAMPLE) from error
        given = _mapping(found, f"--on {path}", ("machines", "link", "workers"))
        kinds = _mapping(given.get("machines"), f"--on {path}: machines")
        if not kinds:
            raise UserError(f"--on {path} names no machines", EXAMPLE)
        link = given.get("link")
        own = given.get("workers", 1)
        if type(own) is not int:
            raise UserError(f"--on {path}: workers is {own!r}", "It is a whole number.")
        return cls(
            tuple(_kind(str(name), kind, cores, memory) for name, kind in kinds.items()),
            own if workers is None else workers,
            None if link is None else Link.read(str(link)),
            ps,
        )


def _kind(name: str, found: Any, cores: int, memory: float) -> Kind:
    given = _mapping(found, name, [field.name for field in fields(Kind) if field.name != "name"])
    size = given.get("memory", memory)
    values = {"count": 1, "cores": cores, **given}
    values["memory"] = read_size(size, f"{name}: memory") if isinstance(size, str) else size
    for key in ("count", "cores"):
        if type(values[key]) is not int:
            raise UserError(f"{name}: {key} is {values[key]!r}", "It is a whole number above 0.")
    for key in ("price", "speed"):
        if key in values and type(values[key]) not in (int, float):
            raise UserError(f"{name}: {key} is {values[key]!r}", "It is a number.")
    return Kind(name, **values)


def _mapping(found: Any, where: str, known: Any = None) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise UserError(f"{where} is {found!r}, and no mapping", EXAMPLE)
    for key in found:
        if known is not None and key not in known:
            raise UserError(f"{where} has an unknown key {key!r}", nearest(str(key), known))
    return found


def read_size(text: str, what: str) -> float:
    """Bytes, as ``16GB``.

    Args:
        text: A number and what it counts.
        what: Whose it is, for the error.

    Returns:
        The bytes.

    Raises:
        UserError: It is none, or says not what it counts.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise UserError(f"{what} {text!r} is no size", "Write it as 16GB, 500MB or 1.5TB.")
    return float(found[1]) * _BYTES[found[2]]


def read_failures(text: str) -> float:
    """How often a machine fails, a second.

    Args:
        text: As ``1/day``.

    Returns:
        The rate.

    Raises:
        UserError: It is none.
    """
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise UserError(
            f"--fail {text!r} does not say how often one machine fails",
            "Write it as 1/day, 0.5/week or 2/hour.",
        )
    return float(found[1]) / _SECONDS[found[2]]
