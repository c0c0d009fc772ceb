"""What a cost is computed of, and what comes out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from spartito.declared import Declared
from spartito.errors import UserError
from spartito.names import divisors, nearest
from spartito.planning.cluster import Cluster
from spartito.planning.profile import Profile

if TYPE_CHECKING:
    from spartito.planning.costs.failures import Loss

INPUT, COMPUTE, UPDATE = "input", "compute", "update"
MEMORY, LINK, OTHERS = "memory", "link", "others"
STAGES, SERVERS, CORES, OVERHEAD = "stages", "servers", "cores", "overhead"
WAITS: Mapping[str, str] = {
    INPUT: "reads its data",
    COMPUTE: "computes",
    UPDATE: "updates",
    MEMORY: "exchanges inside of a machine",
    LINK: "waits for the link",
    OTHERS: "waits for the slowest task",
    STAGES: "waits for other stages",
    SERVERS: "waits for the servers",
    CORES: "waits for a core",
    OVERHEAD: "is in the strategy's own code",
}
"""What a task does in the parts of a step."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What is planned: a training that was profiled, on a cluster, with a global batch size."""

    profile: Profile
    cluster: Cluster
    batch: int

    def __post_init__(self) -> None:
        """Refuse what was measured on other devices than CPUs."""
        if self.profile.device != "cpu":
            raise UserError(
                f"the profile was made on a device of kind {self.profile.device}, and what "
                "exchanges between those take was not measured",
                "Compare there: spartito compare. A plan is for CPUs: hide the accelerators.",
            )

    @property
    def steps_per_epoch(self) -> int | None:
        """Global steps of an epoch; None where the data has no known length."""
        known = self.profile.steps_per_epoch
        return None if known is None else max(1, known * self.profile.batch_size // self.batch)

    @property
    def local_batch(self) -> float:
        """The examples of a task, where each has a replica."""
        return self.batch / self.cluster.tasks


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Which tasks wait for each other, for a simulation of many steps.

    Attributes:
        group: Tasks that meet in every step; 0: all of them.
        every: Steps after which all groups meet, or each has the servers update.
        served: Seconds of the servers for one push; 0 where tasks meet without servers.
        occupied: Seconds until they, or their lines, can take the next one.
        replicas: Tasks that have the same parameters: with several a lost one is replaced.
    """

    group: int = 0
    every: int = 1
    served: float = 0.0
    occupied: float = 0.0
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step takes.

    Attributes:
        seconds: By what a task does then, of `WAITS`.
        memory: Bytes of the task with the most, by what they hold.
        sent: Bytes that the busiest machine sends over its line for each update.
        examples: Trained on in these seconds, over all tasks.
        said: What a closed form cannot know of it.
        rhythm: Which tasks wait for each other.
    """

    seconds: Mapping[str, float]
    memory: Mapping[str, float]
    sent: float
    examples: float
    said: tuple[str, ...] = field(default=())
    rhythm: Rhythm = field(default=Rhythm())

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def rate(self) -> float:
        """Examples a second."""
        return self.examples / self.step

    @property
    def efficiency(self) -> float:
        """The part of a step in which a task does what one device would do."""
        own = sum(self.seconds.get(name, 0.0) for name in (INPUT, COMPUTE, UPDATE))
        return own / self.step

    @property
    def limit(self) -> str:
        """What a step is spent on most, beside its computation if that is not most of it."""
        waits = {name: s for name, s in self.seconds.items() if name not in (COMPUTE, UPDATE)}
        worst = max(waits, key=lambda name: waits[name], default=COMPUTE)
        if waits.get(worst, 0.0) < 0.1 * self.step:
            worst = max(self.seconds, key=lambda name: self.seconds[name])
        return f"{WAITS[worst]} {self.seconds[worst] / self.step:.0%} of a step"

    @property
    def bytes(self) -> float:
        """Memory of a task, all of it."""
        return sum(self.memory.values())


class Costs(Protocol):
    """The costs of one kind of strategy: a module of this package, or an object like one."""

    OPTIONS: tuple[str, ...]
    """What it knows the cost of, of a strategy's options."""

    def candidates(self, situation: Situation) -> Iterable[Mapping[str, Any]]:
        """Options that are worth a line of the table."""
        ...

    def cost(self, strategy: Declared, situation: Situation) -> Cost:
        """What a step takes; `UserError` where it cannot be."""
        ...


@runtime_checkable
class LosesParts(Protocol):
    """Costs of a strategy of which a failure takes a part, while the others go on."""

    def lost(self, strategy: Declared, situation: Situation, rate: float, cost: Cost) -> Loss:
        """The part of the time that failures of one machine, so many a second, take."""
        ...


def check_options(strategy: Declared, known: Iterable[str]) -> None:
    """Refuse options whose cost nobody knows.

    Args:
        strategy: What the user named.
        known: What there is a cost for.

    Raises:
        UserError: It has others.
    """
    for option in strategy.options:
        if option not in known:
            raise UserError(
                f"a plan does not know what {option}={strategy.options[option]} costs",
                f"{nearest(option, known) if list(known) else 'Leave it out.'} "
                "Or run it: spartito compare.",
            )


def whole_number(strategy: Declared, option: str, default: int) -> int:
    """An option that is a whole number of 1 or more.

    Args:
        strategy: Whose it is.
        option: Its name.
        default: Where it is not given.

    Raises:
        UserError: It is something else.
    """
    value = strategy.options.get(option, default)
    if type(value) is not int or value < 1:
        raise UserError(f"{strategy.name}: {option}={value!r}", "It is 1 or more.")
    return value


def tasks_of_model(strategy: Declared, option: str, tasks: int) -> int:
    """Among how many of the ``tasks`` a model is divided, as the option says; by default all.

    Raises:
        UserError: It is no whole number, or does not divide the tasks.
    """
    size = whole_number(strategy, option, tasks)
    if tasks % size:
        raise UserError(
            f"{option}={size} in a job of {tasks} tasks",
            f"It divides the number of tasks: {divisors(tasks)}.",
        )
    return size
