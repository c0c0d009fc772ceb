"""The launchers for SkyPilot and dstack: they check what is asked for and write the file."""

from __future__ import annotations

import re
import shlex
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spartito.errors import UserError
from spartito.launch.clouds import dstack, sky
from spartito.launch.clouds.package import asked_package, installed_package, of_no_index
from spartito.launch.clouds.plan import Data, Nodes
from spartito.launch.containers.plan import IMAGE
from spartito.launch.fetch import SCHEMES, parse_url
from spartito.launch.file_plan import (
    FileLauncher,
    check_apart,
    check_text,
    folder_here,
    name_of,
    print_file,
)
from spartito.launch.images import check_image
from spartito.launch.job import JobSpec, check_folders_of_recipe, option
from spartito.launch.kubernetes.values import check_memory, quantity
from spartito.launch.processes.roles import Roles
from spartito.launch.target import check_data, named_here

BUCKETS = ("s3", "gs", "r2", "cos", "oci", "nebius", "coreweave")
"""Stores that SkyPilot mounts."""

NAME = re.compile(r"[a-z][a-z0-9-]{0,38}[a-z0-9]")
"""Of a job or a volume: what both tools allow."""

GPU_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud(FileLauncher[Nodes]):
    """What both have in common."""

    gpus: bool = option("A GPU for each worker.", False)
    gpu_type: str | None = option("With --gpus: which, as L4 or A100.", metavar="NAME")
    cpus: str = option("CPUs that each node has at least.", "2", metavar="N")
    memory: str = option("Memory that each node has at least, as 4Gi.", "4Gi", metavar="SIZE")
    spot: bool = option("Nodes that the cloud may take away, for less.", False)
    setup: tuple[str, ...] = option(
        "A line of the shell that prepares each node.", (), metavar="LINE"
    )
    timeout: int = option("Seconds that a task waits for another.", 600, least=1)

    def write(self, planned: Nodes) -> None:
        """As `FileLauncher.write`: print it, after what the user should know."""
        print_file(self._text(planned), self._notes(planned))

    @abstractmethod
    def _text(self, job: Nodes) -> str:
        """The file."""

    @abstractmethod
    def _notes(self, job: Nodes) -> list[str]:
        """What the user should know of it."""

    def _planned(
        self,
        job: JobSpec,
        tool: str,
        *,
        scripts: str,
        runs: str,
        seen: str | None,
        **own: Any,
    ) -> Nodes:
        """Check what both tools want; ``own`` is what one of them adds.

        ``scripts``, ``runs`` and ``seen`` are where the script's folder, run folders and the data
        are on a node.
        """
        program, roles = job.program, job.roles()
        strategy = job.choose(roles)
        check_apart(strategy.name, roles, "each task has a node of its own")
        self._check_values(own["image"])
        check_folders_of_recipe(program, tool)
        name = job.name or name_of(program.title)
        if not NAME.fullmatch(name):
            raise UserError(
                f"--name {name!r} cannot name a job",
                "Use 2 to 40 small letters, digits and -, with a letter first and no - at the end.",
            )
        script = program.script
        there = None if script is None else f"{scripts}/{script.name}"
        words = program.argv(there, out=f"{runs}/{name}", data=seen)
        check_text((*words, *self.setup))
        ours = len(words) - len(program.arguments)
        return Nodes(
            name=name,
            about=program.title,
            command=("python", *map(_at_home, words[:ours]), *map(shlex.quote, words[ours:])),
            strategy=strategy,
            roles=roles,
            run=f"{runs}/{name}",
            scripts=None if script is None else named_here("the script's folder", script.parent),
            cpus=f"{quantity('--cpus', self.cpus).normalize():f}",
            memory=f"{(quantity('--memory', self.memory) / 2**30).normalize():f}",
            setup=self.setup,
            gpus=self.gpus,
            gpu_type=self.gpu_type,
            spot=self.spot,
            timeout=self.timeout,
            ports=job.ports,
            insecure=job.insecure,
            **own,
        )

    def _check_values(self, image: str | None) -> None:
        if image is not None:
            check_image(image)
        quantity("--cpus", self.cpus)
        check_memory(self.memory)
        if self.gpu_type is not None:
            if not self.gpus:
                raise UserError(f"--gpu-type {self.gpu_type} without --gpus", "Add --gpus.")
            if not GPU_TYPE.fullmatch(self.gpu_type):
                raise UserError(f"--gpu-type {self.gpu_type!r} is no name of a GPU", "As L4.")
        for line in self.setup:
            if not line.strip() or "\n" in line:
                raise UserError(f"--setup {line!r} is not one line", "Give --setup once for each.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sky(Cloud):
    """Write the file of a task for SkyPilot; redirect it into a file.

    Example: spartito cluster sky mnist --workers 4 -- --epochs 3 > sky.yaml

    Args:
        gpus: whether each node gets a GPU.
        gpu_type: which.
        cpus: the CPUs that each node has at least.
        memory: its memory, as ``4Gi``.
        spot: whether the cloud may take nodes away.
        setup: lines of the shell that prepare a node, instead of those that install Spartito.
        timeout: how long a task waits for another, in seconds.
        image: what nodes run in, from a registry; the machine itself by default.
        package: what is installed on each node: a requirement as pip has it, or a wheel here.
        restarts: how often a managed job starts again after any error.
    """

    image: str | None = option("The image of the nodes; their own system else.", metavar="NAME")
    package: str | None = option(
        "What each node installs: spartito of this version, or the path of a wheel.",
        metavar="NAME",
    )
    restarts: int | None = option(
        "With --out: how often all start again after any error, a mistake too; 0 by default.",
        least=0,
    )

    def plan(self, job: JobSpec) -> Nodes:
        out = None if job.out is None else _bucket("--out", str(job.out))
        if self.gpus and self.gpu_type is None:
            raise UserError("--gpus: SkyPilot wants to know which", "Add --gpu-type L4, or others.")
        if out is None:
            for flag, given, why in (
                ("--spot", self.spot, "what was saved goes with a node that is taken away"),
                ("--evaluator", job.evaluator, "it reads the checkpoints on a node of its own"),
                ("--restarts", self.restarts is not None, "only a managed job starts again"),
            ):
                if given:
                    raise UserError(f"{flag} without --out: {why}", "Add --out s3://bucket/runs.")
        if self.setup and self.package is not None:
            raise UserError(
                f"--setup and --package {self.package}: the lines install Spartito themselves",
                "Leave one of them out.",
            )
        if self.image is not None and self.package is not None:
            raise UserError(
                f"--image {self.image} and --package {self.package}: an image has Spartito already",
                "Leave one of them out.",
            )
        data = _sky_data(job.data)
        own, folder = installed_package()
        if self.package is not None or self.setup or self.image is not None:
            folder = ""
        return self._planned(
            job,
            "sky",
            scripts=sky.WORKDIR,
            runs="~/runs",
            seen=None if job.data is None else sky.data_of(data.url),
            data=data,
            out=out,
            image=self.image,
            package=own if self.package is None else asked_package(self.package),
            installed_from=folder,
            restarts=self.restarts or 0,
        )

    def _text(self, job: Nodes) -> str:
        return sky.sky_file(job)

    def _notes(self, job: Nodes) -> list[str]:
        if not job.installed_from:
            return []
        return [of_no_index(job.package, shlex.quote(job.installed_from))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dstack(Cloud):
    """Write the file of a task for dstack; redirect it into a file.

    Example: spartito cluster dstack mnist --workers 4 --out /mnt/runs > .dstack.yml

    Args:
        gpus: as `Sky` has it, like the next four.
        gpu_type: which GPU.
        cpus: of each node.
        memory: of each node.
        spot: whether nodes may be taken away.
        setup: lines of the shell before the task.
        timeout: how long a task waits for another, in seconds.
        image: what all run, from a registry.
    """

    image: str = option("The image that all run.", IMAGE, metavar="NAME")

    def plan(self, job: JobSpec) -> Nodes:
        if job.out is None:
            raise UserError(
                "no --out: what a container writes goes with it",
                "Name a folder of the machines, which they share where they are several: --out "
                "/mnt/runs. Or for one node a volume: --out NAME.",
            )
        if quantity("--cpus", self.cpus) % 1:
            raise UserError(f"--cpus {self.cpus}: dstack counts whole ones", "As --cpus 2.")
        roles = job.roles()
        out = _kept("--out", str(job.out), roles)
        data = _dstack_data(job.data, roles)
        found = self._planned(
            job,
            "dstack",
            scripts="/scripts",
            runs="/runs",
            seen=None if job.data is None else dstack.data_of(data.url),
            data=data,
            out=out,
            image=self.image,
        )
        for word in (*found.command, *found.setup, str(found.strategy)):
            if "${{" in word:
                raise UserError(
                    f"{word[:99]!r}: dstack would put a value in for ${{{{", "Reword it."
                )
        return found

    def _text(self, job: Nodes) -> str:
        return dstack.dstack_file(job)

    def _notes(self, job: Nodes) -> list[str]:
        volumes = {"--out": job.out, "--data": job.data.store}
        said = [folder_here(flag, name or "", "a volume") for flag, name in volumes.items() if name]
        return [note for note in (dstack.image_of_nobody(job), *said) if note]


def _at_home(word: str) -> str:
    """A word of ours for the shell; ``~/`` in it is the home there."""
    before, home, rest = word.partition("~/")
    return f'{before}"$HOME"/{shlex.quote(rest)}' if home else shlex.quote(word)


def _bucket(flag: str, text: str) -> str:
    scheme, rest = parse_url(text) or ("", "")
    if scheme.lower() not in BUCKETS or not rest:
        raise UserError(
            f"{flag} {text} is no bucket", f"Name one, as s3://bucket/runs: {', '.join(BUCKETS)}."
        )
    if bad := re.search(r"[$\s]", text):
        raise UserError(f"{flag} {text!r} has {bad[0]!r}", "Name a bucket without.")
    return f"{scheme.lower()}://{rest.rstrip('/')}"


def _sky_data(text: str | None) -> Data:
    """A folder here, a bucket, or what is fetched."""
    if text is None:
        return Data()
    if (found := parse_url(text)) is None:
        check_data(Path(text))
        return Data(folder=named_here("--data", Path(text)))
    if found[0] in SCHEMES and found[1]:
        return Data(url=f"{found[0]}://{found[1]}")
    return Data(store=_bucket("--data", text))


def _kept(flag: str, text: str, roles: Roles) -> str:
    """A folder of dstack's machines, or a volume for one of them."""
    if text.startswith("/"):
        if re.search(r"[:$\s]", text) or ".." in Path(text).parts or text == "/":
            raise UserError(f"{flag} {text!r} is no folder that dstack mounts", "As /mnt/runs.")
        return text
    if not NAME.fullmatch(text):
        raise UserError(
            f"{flag} {text!r} is neither a folder of the machines nor the name of a volume",
            "As /mnt/runs, or runs.",
        )
    if len(roles.tasks) > 1:
        raise UserError(
            f"{flag} {text} for {len(roles.tasks)} nodes: a volume is attached to one machine",
            "Name a folder that the machines share: /mnt/runs.",
        )
    return text


def _dstack_data(text: str | None, roles: Roles) -> Data:
    """A folder of the machines, a volume, or what is fetched."""
    if text is None:
        return Data()
    if (found := parse_url(text)) is not None:
        if found[0] not in SCHEMES or not found[1]:
            raise UserError(f"--data {text} cannot be fetched", "Use http:// or https://.")
        return Data(url=f"{found[0]}://{found[1]}")
    kept = _kept("--data", text, roles)
    return Data(folder=kept) if kept.startswith("/") else Data(store=kept)
