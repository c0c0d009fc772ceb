"""A job on nodes that a cloud tool rents, as one checked value; a node has one task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spartito.cluster.address_list import ENV_CHIEF, ENV_EVALUATOR, ENV_PS
from spartito.launch.file_plan import Planned
from spartito.launch.processes.local import RUNTIME
from spartito.launch.yaml_text import comment, commented
from spartito.names import ENV_PORTS, ENV_RESUME, ENV_SNAPSHOT_DIR


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
class Nodes(Planned):
    """A job for a cloud tool, checked: see `Cloud.plan`.

    ``command`` is in the words of the shell. ``run`` is the run folder of the job there,
    ``scripts`` the folder here that has its script. ``out`` is what keeps run folders, where they
    are not a node's own. ``cpus`` and ``memory`` (GiB) are what each node has at least.
    ``package`` is what pip installs, ``installed_from`` the folder that it came from here, where
    an index may not have it. ``setup`` are lines of the shell before the task; empty where the
    file says its own.
    """

    run: str
    cpus: str
    memory: str
    scripts: str | None = None
    out: str | None = None
    data: Data = Data()
    image: str | None = None
    package: str = "spartito"
    installed_from: str = ""
    setup: tuple[str, ...] = ()
    gpus: bool = False
    gpu_type: str | None = None
    spot: bool = False
    ports: str | None = None
    restarts: int = 0

    @property
    def line(self) -> str:
        """What the shell of a node runs."""
        return " ".join(self.command)

    @property
    def environment(self) -> dict[str, str]:
        """What every node is told."""
        roles = {
            ENV_CHIEF: int(self.roles.chief),
            ENV_PS: self.roles.ps,
            ENV_EVALUATOR: int(self.roles.evaluator),
        }
        told = {name: str(number) for name, number in roles.items() if number}
        ports = {} if self.ports is None else {ENV_PORTS: self.ports}
        return {**self.said, **told, ENV_RESUME: "1", **ports, **self.tls, **RUNTIME}

    @property
    def snapshots(self) -> dict[str, str]:
        """Where servers keep theirs, if there are any."""
        return {ENV_SNAPSHOT_DIR: f"{self.run}/snapshots"} if self.roles.ps else {}


def text_of(heading: Iterable[str], document: Mapping[str, object], above: dict[str, str]) -> str:
    """The file: its heading, then the document in parts, with a comment above what wants one.

    Args:
        heading: the paragraphs and lines of the first comment; indented ones are commands.
        document: what the tool reads.
        above: what is said above a line, by how the line begins.
    """
    lines: list[str] = []
    for said in heading:
        lines += [f"# {said}"] if said.startswith(" ") else comment(said) or ["#"]
    parts = {"resources:", "commands:", "env:", "envs:", "spot_policy:"} | set(above)
    return "\n".join([*lines, "", *commented(document, above, parts), ""])
