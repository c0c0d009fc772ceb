"""A profile: what a step takes on one device, and what an exchange takes on its machine."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from spartito.errors import UserError

VERSION = 6
KIND = "spartito profile"
PARTS = ("input", "forward", "backward", "update", "other")
"""What a step is made of, in its order."""


@dataclass(frozen=True, slots=True)
class Line:
    """What takes ``start`` at least, and ``each`` more for every further one."""

    start: float
    each: float

    def at(self, count: float) -> float:
        """What ``count`` of them take."""
        return self.start + self.each * count

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Self:
        """The line nearest to two or more points, by relative distance; it never falls.

        One point alone is proportional: what it takes at least cannot be known.
        """
        if len({x for x, _ in points}) < 2:
            x, y = points[0]
            return cls(0.0, y / max(x, 1e-12))
        weights = [1 / max(y, 1e-12) ** 2 for _, y in points]
        total = sum(weights)
        x_mean = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
        y_mean = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
        spread = sum(w * (x - x_mean) ** 2 for w, (x, _) in zip(weights, points, strict=True))
        joint = sum(
            w * (x - x_mean) * (y - y_mean) for w, (x, y) in zip(weights, points, strict=True)
        )
        each = max(0.0, joint / spread)
        start = y_mean - each * x_mean
        if start < 0:
            each = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / sum(
                w * x * x for w, (x, _) in zip(weights, points, strict=True)
            )
            start = 0.0
        return cls(start, each)


@dataclass(frozen=True, slots=True)
class Model:
    """Bytes of a model and its optimizer."""

    name: str
    fingerprint: int
    parameters: int
    gradients: int
    tensors: int
    largest_tensor: int
    buffers: int
    optimizer: int
    optimizer_name: str


@dataclass(frozen=True, slots=True)
class Part:
    """A module before or behind which a pipeline may cut.

    Attributes:
        name: Its path.
        seconds: Of its forward and backward pass; parts are compared with each other alone.
        parameters: Its bytes.
        output: Bytes that the next one gets, for each example.
    """

    name: str
    seconds: float
    parameters: int
    output: float


@dataclass(frozen=True, slots=True)
class Sample:
    """A step with so many threads and examples: seconds of its parts, and how they vary."""

    threads: int
    batch: float
    input: float
    forward: float
    backward: float
    update: float
    other: float
    steps: int
    deviation: float
    between_rounds: float


@dataclass(frozen=True, slots=True)
class Along:
    """What tensors of a model cut among some tasks come to.

    Attributes:
        parameters: The part of all bytes that one task has.
        calls: Collectives of a step.
        bytes: What they bring together, for each example.
        passes: What a forward and backward pass of one task takes, as a part of that of a whole
            model with as many examples, beside these collectives.
    """

    parameters: float
    calls: int
    bytes: float
    passes: float


@dataclass(frozen=True, slots=True)
class Code:
    """What numbers in fewer bits come to, for each of their bytes.

    Attributes:
        bytes: That are sent.
        pack: Seconds.
        unpack: Seconds, and to add them up.
    """

    bytes: float
    pack: float
    unpack: float


@dataclass(frozen=True, slots=True)
class Overhead:
    """What a strategy's own code takes, beyond the closed form of its steps: seconds.

    Attributes:
        meeting: For each meeting of its tasks, which most have in every step.
        epoch: At the beginning and end of an epoch together.
    """

    meeting: float
    epoch: float


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine takes for what tasks do together.

    Attributes:
        cores: That a process may use.
        memory: Bytes.
        shared: Seconds of a sum between two processes by shared memory, by bytes.
        sockets: The same by sockets of the loopback.
        copy: Seconds in which a process copies a byte, of as many as the model has.
        contention: By what part a task computes slower for each other one that does, too.
        crowds: By the number of tasks, more than there are cores: how many times as long a step
            takes where all meet after each; none, where nobody asked.
        disk: Bytes a second that reach its disk.
        start: Seconds from the start of a process to its first step.
        codes: Of compressed exchanges, by their name.
        overheads: Of strategies on one machine, as a plain model was measured to need them.
        overheads_between: Of those whose tasks exchange by sockets; none, where nobody asked.
    """

    cores: int
    memory: float
    shared: Line
    sockets: Line
    copy: float
    contention: float
    crowds: Mapping[int, float]
    disk: float
    start: float
    codes: Mapping[str, Code]
    overheads: Mapping[str, Overhead]
    overheads_between: Mapping[str, Overhead]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a plan knows of a training; all of it was measured, or is the user's own figure.

    ``adding`` are the seconds in which the gradients of a pass are added to those that wait.
    ``uncut`` says why no pipeline trains the model, where none does; ``slowdowns`` are, by their
    number, how many times as long its stages compute together. ``base_memory`` are the bytes
    of a process without tensors; a task that is forked has ``fork_saves`` less in RAM: libraries
    that it has not used since. Passes have ``activations`` bytes for each example beside it, and an
    update ``scratch``, of which it needs as large a part as of the optimizer's state.
    """

    target: str
    source: str
    spartito: str
    torch: str
    model: Model
    batch_size: int
    examples: int | None
    steps_per_epoch: int | None
    accumulate: int
    tokens_per_example: int | None
    example_bytes: float
    device: str
    base_memory: int
    fork_saves: int
    activations: float
    scratch: float
    adding: float
    samples: tuple[Sample, ...]
    parts: tuple[Part, ...]
    uncut: str
    slowdowns: Mapping[int, float]
    mesh: Mapping[int, Along]
    machine: Machine

    def seconds(self, part: str, batch: float, threads: float) -> float:
        """What a part of a step takes on one device of this machine.

        Between and beyond the measured numbers of threads it follows 1 / threads.

        Args:
            part: One of `PARTS`.
            batch: Examples.
            threads: That compute.
        """
        counts = sorted({sample.threads for sample in self.samples})
        values = {}
        for count in counts:
            own = [(s.batch, getattr(s, part)) for s in self.samples if s.threads == count]
            values[count] = Line.through(own).at(batch)
        if len(counts) == 1 or threads <= counts[0]:
            return values[counts[0]] * max(1.0, counts[0] / threads)
        first, last = counts[0], counts[-1]
        towards = (1 / first - 1 / threads) / (1 / first - 1 / last)
        found = values[first] + (values[last] - values[first]) * towards
        return max(found, values[last] * last / threads if threads > last else 0.0)

    def deviation(self, threads: float) -> float:
        """The standard deviation of a step's seconds, as a part of them, where it is least.

        Other programs only add to it.
        """
        nearest = min({s.threads for s in self.samples}, key=lambda count: abs(count - threads))
        found = [s.deviation for s in self.samples if s.threads == nearest]
        return min(found)

    def uncertainty(self, threads: float) -> float:
        """By what part most rounds of measurements were slower than the quickest one."""
        nearest = min({s.threads for s in self.samples}, key=lambda count: abs(count - threads))
        return max(s.between_rounds for s in self.samples if s.threads == nearest)

    def slowdown(self, stages: int) -> float:
        """How many times as long so many stages compute together as the model that is whole."""
        points = [(float(count), each) for count, each in self.slowdowns.items()]
        return Line.through(points).at(stages) if len(points) > 1 else 1.0

    @property
    def largest_part(self) -> int:
        """Bytes of the part with the most parameters; of a tensor, where parts are not known."""
        if len(self.parts) < 2:  # no pipeline trains it
            return self.model.largest_tensor
        return max(part.parameters for part in self.parts)

    def text(self) -> str:
        """The file."""
        return json.dumps({"kind": KIND, "version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """A profile that was saved.

        Args:
            path: The file that ``--save-profile`` named.

        Returns:
            The profile.

        Raises:
            UserError: There is none, or another version wrote it.
        """
        again = "Profile again, and keep it: spartito plan TARGET --save-profile p.json."
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"--profile {path} cannot be read: {error}", again) from error
        if not isinstance(found, dict) or found.get("kind") != KIND:
            raise UserError(f"--profile {path} is no profile", again)
        if found.get("version") != VERSION:
            raise UserError(
                f"--profile {path} has version {found.get('version')}, and this reads {VERSION}",
                again,
            )
        try:
            return cls.of({k: v for k, v in found.items() if k not in ("kind", "version")})
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"--profile {path} is damaged: {error}", again) from error

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Self:
        """The profile that a record of plain values is.

        Raises:
            KeyError: Something is missing.
            TypeError: Something is of another kind.
            ValueError: A number is none.
        """
        if unknown := set(found) - {field.name for field in fields(cls)}:
            raise ValueError(f"unknown {', '.join(sorted(unknown))}")
        machine = dict(found["machine"])
        machine |= {name: Line(**machine[name]) for name in ("shared", "sockets")}
        for field in ("overheads", "overheads_between"):
            machine[field] = {name: Overhead(**each) for name, each in machine[field].items()}
        machine["crowds"] = {int(tasks): each for tasks, each in machine["crowds"].items()}
        machine["codes"] = {name: Code(**each) for name, each in machine["codes"].items()}
        made = cls(
            **dict(found)
            | {
                "model": Model(**found["model"]),
                "samples": tuple(Sample(**each) for each in found["samples"]),
                "parts": tuple(Part(**each) for each in found["parts"]),
                "slowdowns": {int(count): each for count, each in found["slowdowns"].items()},
                "mesh": {int(size): Along(**each) for size, each in found["mesh"].items()},
                "machine": Machine(**machine),
            }
        )
        if not made.samples or not all(
            math.isfinite(getattr(s, part)) for s in made.samples for part in PARTS
        ):
            raise ValueError("its steps have no times")
        return made

    def check_target(self, target: str, source: str) -> None:
        """Refuse to stand for another model.

        Args:
            target: The script or recipe that is to be planned.
            source: What `source_of` says of it.

        Raises:
            UserError: It was made of something else.
        """
        again = "Leave --profile out to profile again, or leave the script out."
        if self.target != target:
            raise UserError(f"--profile is of {self.target}, and not of {target}", again)
        if self.source != source:
            raise UserError(f"--profile was made before {target} or its arguments changed", again)


def source_of(script: Path | None, arguments: Sequence[str]) -> str:
    """What tells one program from another: its text and its arguments.

    Args:
        script: The script; None for a recipe, which its name tells.
        arguments: Its own.

    Returns:
        A checksum.
    """
    text = b"" if script is None else script.read_bytes()
    return hashlib.sha256(text + json.dumps(list(arguments)).encode()).hexdigest()[:16]
