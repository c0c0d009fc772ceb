"""A job on nodes that a cloud tool rents, as one checked value; a node has one task."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from textwrap import wrap

from spartito.cluster.listed import ENV_CHIEF, ENV_EVALUATOR, ENV_PS
from spartito.launch.local import RUNTIME
from spartito.launch.roles import Roles
from spartito.launch.written import dump
from spartito.names import (
    ENV_PORTS,
    ENV_RESUME,
    ENV_SNAPSHOT_DIR,
    ENV_STRATEGY,
    ENV_STRATEGY_OPTIONS,
    ENV_TIMEOUT,
    ENV_TLS,
)

WIDTH = 98
"""Of a comment."""

NAMES = {"ps": "parameter server"}


@dataclass(frozen=True, slots=True)
class Data:
    """Where the data of a job is: one of three.

    ``folder`` lies here, or with dstack on each machine; ``store`` is a bucket, or dstack's
    volume; ``url`` is fetched onto each node.
    """

    folder: str | None = None
    store: str | None = None
    url: str | None = None


@dataclass(frozen=True, slots=True)
class Nodes:
    """A job for a cloud tool, checked: see `Cloud.plan`.

    ``words`` come after ``python``, the last ``given`` of them are the user's; ``about`` says in
    a word what they run. ``run`` is the run folder of the job there, ``scripts`` the folder here
    that has its script. ``out`` is what keeps run folders, where they are not a node's own.
    ``cpus`` and ``memory`` (GiB) are what each node has at least. ``setup`` are lines of the
    shell before the task; empty where the file says its own.
    """

    name: str
    about: str
    words: tuple[str, ...]
    given: int
    strategy: str
    roles: Roles
    run: str
    cpus: str
    memory: str
    strategy_options: str | None = None
    scripts: str | None = None
    out: str | None = None
    data: Data = Data()
    image: str | None = None
    package: str = "spartito"
    setup: tuple[str, ...] = ()
    gpus: bool = False
    gpu_type: str | None = None
    spot: bool = False
    timeout: float = 600.0
    ports: str | None = None
    insecure: bool = False
    restarts: int = 0

    @property
    def meets(self) -> bool:
        """Whether tasks meet at all."""
        return sum(task.type != "evaluator" for task in self.roles.tasks) > 1

    @property
    def who(self) -> str:
        """The tasks, as a sentence has them."""
        counts: dict[str, int] = {}
        for task in self.roles.tasks:
            counts[task.type] = counts.get(task.type, 0) + 1
        return ", ".join(
            f"{n} {NAMES.get(role, role)}{'s' if n > 1 else ''}" for role, n in counts.items()
        )

    @property
    def command(self) -> str:
        """What the shell of a node runs; ``~/`` in our own words is the home there."""
        own = len(self.words) - self.given
        words = [*map(_at_home, self.words[:own]), *map(shlex.quote, self.words[own:])]
        return " ".join(["python", *words])

    @property
    def environment(self) -> dict[str, str]:
        """What every node is told."""
        said = {ENV_STRATEGY: self.strategy}
        if self.strategy_options is not None:
            said[ENV_STRATEGY_OPTIONS] = self.strategy_options
        roles = {
            ENV_CHIEF: int(self.roles.chief),
            ENV_PS: self.roles.ps,
            ENV_EVALUATOR: int(self.roles.evaluator),
        }
        said |= {name: str(number) for name, number in roles.items() if number}
        said |= {ENV_TIMEOUT: f"{self.timeout:g}", ENV_RESUME: "1"}
        if self.ports is not None:
            said[ENV_PORTS] = self.ports
        if self.insecure:
            said[ENV_TLS] = "off"
        return said | RUNTIME

    @property
    def snapshots(self) -> dict[str, str]:
        """Where servers keep theirs, if there are any."""
        return {ENV_SNAPSHOT_DIR: f"{self.run}/snapshots"} if self.roles.ps else {}


def text_of(heading: Iterable[str], document: dict[str, object], above: dict[str, str]) -> str:
    """The file: its heading, then the document in parts, with a comment above what wants one.

    Args:
        heading: the paragraphs and lines of the first comment; indented ones are commands.
        document: what the tool reads.
        above: what is said above a line, by how the line begins.
    """
    lines: list[str] = []
    for said in heading:
        lines += [f"# {said}"] if said.startswith(" ") else list(comment(said)) or ["#"]
    left = dict(above)
    parts = {"resources:", "env:", "envs:", "spot_policy:"} | set(above)
    lines.append("")
    for line in dump(document).splitlines():
        key = next((key for key in left if line.lstrip().startswith(key)), None)
        if lines[-1] and any(line.startswith(part) for part in parts):
            lines.append("")
        if key is not None:
            lines += comment(left.pop(key), " " * (len(line) - len(line.lstrip())))
        lines.append(line)
    return "\n".join([*lines, ""])


def comment(text: str, indent: str = "") -> Iterator[str]:
    """The lines of a comment."""
    return (f"{indent}# {line}" for line in wrap(text, WIDTH - len(indent)))


def _at_home(word: str) -> str:
    """A word of ours for the shell."""
    before, home, rest = word.partition("~/")
    return f'{before}"$HOME"/{shlex.quote(rest)}' if home else shlex.quote(word)
