"""The launchers for SkyPilot and dstack: they check what is asked for and write the file."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from spartito.cluster.endpoints import parse_range
from spartito.errors import UserError
from spartito.launch.clouds import dstack, sky
from spartito.launch.clouds.plan import Data, Nodes
from spartito.launch.containers.plan import IMAGE, LEAST_MEMORY
from spartito.launch.job import JobSpec, check_folders_of_recipe, option
from spartito.launch.kubernetes.values import check_image, quantity
from spartito.launch.roles import Roles
from spartito.launch.target import check_folder, inside_here
from spartito.registry import default_name, strategy_info

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+(.+)")
"""A URL, as a path has it: with one slash."""

FETCHED = ("http", "https")
"""What is fetched onto each node."""

BUCKETS = ("s3", "gs", "r2", "cos", "oci", "nebius", "coreweave")
"""Stores that SkyPilot mounts."""

NAME = re.compile(r"[a-z][a-z0-9-]{0,38}[a-z0-9]")
"""Of a job or a volume: what both tools allow."""

GPU_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """What both have in common."""

    gpus: bool = option("A GPU for each worker.", False)
    gpu_type: str | None = option("With --gpus: which, as L4 or A100.", metavar="NAME")
    cpus: str = option("CPUs that each node has at least.", "2", metavar="N")
    memory: str = option("Memory that each node has at least, as 4Gi.", "4Gi", metavar="SIZE")
    spot: bool = option("Nodes that the cloud may take away, for less.", False)
    setup: tuple[str, ...] = option("A line of the shell that prepares each node.", ())
    timeout: int = option("Seconds that a task waits for another.", 600, least=1)

    def planned(
        self,
        job: JobSpec,
        command: str,
        *,
        scripts: str,
        runs: str,
        data: tuple[Data, str | None],
        out: str | None,
        image: str | None,
        package: str = "",
        restarts: int = 0,
    ) -> Nodes:
        """Check what both tools want.

        Args:
            job: what is to run.
            command: the last word of the command that was typed.
            scripts: where the script's folder is on a node.
            runs: where run folders are.
            data: the data, and where it is on a node.
            out: what keeps the run folders.
            image: what the nodes run, None for the machine itself.
            package: what pip installs, where it does.
            restarts: how often the job starts again after an error.

        Returns:
            What the file says.

        Raises:
            UserError: the job cannot run so.
        """
        program, roles = job.program, job.roles()
        strategy = job.choose(roles)
        if roles.workers > 1 and strategy_info(strategy).one_machine:
            raise UserError(
                f"{strategy} is for one machine, and each task has a node of its own",
                f"Use --strategy {default_name(2, 0)}.",
            )
        self._check_values(image)
        check_folders_of_recipe(program, command)
        if job.ports is not None:
            parse_range(job.ports, "--ports")
        name = _name(job.name, program.title)
        script = program.script
        there = None if script is None else f"{scripts}/{script.name}"
        words = program.argv(there, out=f"{runs}/{name}", data=data[1])
        for word in (*words, *self.setup):
            if word.encode("utf-8", "replace").decode() != word or "\0" in word:
                raise UserError(f"{word[:99]!r} is not text", "The file is UTF-8.")
        return Nodes(
            name=name,
            about=program.title,
            words=words,
            given=len(program.arguments),
            strategy=strategy,
            strategy_options=job.strategy_options,
            roles=roles,
            run=f"{runs}/{name}",
            scripts=None if script is None else local("the script's folder", script.parent),
            out=out,
            data=data[0],
            image=image,
            package=package,
            cpus=f"{quantity('--cpus', self.cpus).normalize():f}",
            memory=f"{(quantity('--memory', self.memory) / 2**30).normalize():f}",
            setup=self.setup,
            gpus=self.gpus,
            gpu_type=self.gpu_type,
            spot=self.spot,
            timeout=self.timeout,
            ports=job.ports,
            insecure=job.insecure,
            restarts=restarts,
        )

    def _check_values(self, image: str | None) -> None:
        if image is not None:
            check_image(image)
        quantity("--cpus", self.cpus)
        if quantity("--memory", self.memory) < LEAST_MEMORY:
            raise UserError(
                f"--memory {self.memory} is too small: Python and torch alone take "
                f"{LEAST_MEMORY >> 20}Mi",
                "The model, its optimizer and a batch need memory as well: --memory 4Gi, for "
                "example.",
            )
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

    def start(self, job: JobSpec) -> int:
        """Print the file.

        Args:
            job: what is to run.

        Returns:
            0.

        Raises:
            UserError: the job cannot run so; nothing was written.
        """
        sys.stdout.write(sky.sky_file(self.plan(job)))
        return 0

    def plan(self, job: JobSpec) -> Nodes:
        """Check the job, before there is a file.

        Args:
            job: what is to run.

        Returns:
            What the file says.

        Raises:
            UserError: the job cannot run so.
        """
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
        data = _sky_data(None if job.data is None else str(job.data))
        return self.planned(
            job,
            "sky",
            scripts=sky.WORKDIR,
            runs="~/runs",
            data=(data, None if job.data is None else sky.data_of(data.url)),
            out=out,
            image=self.image,
            package=_package(self.package),
            restarts=self.restarts or 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dstack(Cloud):
    """Write the file of a task for dstack; redirect it into a file.

    Example: spartito cluster dstack mnist --workers 4 --out /mnt/runs > .dstack.yml

    Args:
        gpus: whether each worker gets a GPU.
        gpu_type: which.
        cpus: the CPUs that each node has at least.
        memory: its memory, as ``4Gi``.
        spot: whether the cloud may take nodes away.
        setup: lines of the shell before the task.
        timeout: how long a task waits for another, in seconds.
        image: what all run, from a registry.
    """

    image: str = option("The image that all run.", IMAGE, metavar="NAME")

    def start(self, job: JobSpec) -> int:
        """Print the file.

        Args:
            job: what is to run.

        Returns:
            0.

        Raises:
            UserError: the job cannot run so; nothing was written.
        """
        sys.stdout.write(dstack.dstack_file(self.plan(job)))
        return 0

    def plan(self, job: JobSpec) -> Nodes:
        """Check the job, before there is a file.

        Args:
            job: what is to run.

        Returns:
            What the file says.

        Raises:
            UserError: the job cannot run so.
        """
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
        data = _dstack_data(None if job.data is None else str(job.data), roles)
        found = self.planned(
            job,
            "dstack",
            scripts="/scripts",
            runs="/runs",
            data=(data, None if job.data is None else dstack.data_of(data.url)),
            out=out,
            image=self.image,
        )
        for word in (*found.words, *found.setup, found.strategy_options or ""):
            if "${{" in word:
                raise UserError(
                    f"{word[:99]!r}: dstack would put a value in for ${{{{", "Reword it."
                )
        return found


def local(what: str, path: Path) -> str:
    """``path`` as the file names it: ``./data``, or whole where it is outside of this folder."""
    inside = inside_here(path)
    found = str(path.resolve()) if inside is None else f"./{inside}" if inside.parts else "."
    if bad := re.search(r"[:$\x00-\x1f\x7f]", found):
        raise UserError(f"{what} {found!r} has {bad[0]!r}, which the tool would read", "Rename it.")
    return found


def _name(given: str | None, title: str) -> str:
    """The job's name: as asked, else after its program."""
    own = re.sub(r"[^a-z0-9]+", "-", title.lower().removesuffix(".py")).strip("-")[:40].strip("-")
    name = given or (own if own[:1].isalpha() and len(own) > 1 else f"job-{own}".strip("-"))
    if not NAME.fullmatch(name):
        raise UserError(
            f"--name {name!r} cannot name a job",
            "Use 2 to 40 small letters, digits and -, with a letter first and no - at the end.",
        )
    return name


def _bucket(flag: str, text: str) -> str:
    found = URL.fullmatch(text)
    if found is None or found[1].lower() not in BUCKETS:
        raise UserError(
            f"{flag} {text} is no bucket", f"Name one, as s3://bucket/runs: {', '.join(BUCKETS)}."
        )
    if bad := re.search(r"[$\s]", text):
        raise UserError(f"{flag} {text!r} has {bad[0]!r}", "Name a bucket without.")
    return f"{found[1].lower()}://{found[2].rstrip('/')}"


def _sky_data(text: str | None) -> Data:
    """A folder here, a bucket, or what is fetched."""
    found = None if text is None else URL.fullmatch(text)
    if text is None:
        return Data()
    if found is None:
        check_folder("--data", Path(text))
        return Data(folder=local("--data", Path(text)))
    if found[1] in FETCHED:
        return Data(url=f"{found[1]}://{found[2]}")
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
    found = None if text is None else URL.fullmatch(text)
    if text is None:
        return Data()
    if found is not None and found[1] in FETCHED:
        return Data(url=f"{found[1]}://{found[2]}")
    if found is not None:
        raise UserError(f"--data {text} cannot be fetched", "Use http:// or https://.")
    kept = _kept("--data", text, roles)
    return Data(folder=kept) if kept.startswith("/") else Data(store=kept)


def _package(text: str | None) -> str:
    """What pip installs; a wheel is one that is here."""
    if text is None:
        return f"spartito=={version('spartito')}"
    if not text.endswith(".whl"):
        if not text.strip() or re.search(r"[\x00-\x1f]", text) or text.startswith("-"):
            raise UserError(f"--package {text!r} is nothing that pip installs")
        return text
    if not Path(text).is_file():
        raise UserError(f"--package {text} is no file", f"The folder we are in is {Path.cwd()}.")
    return local("--package", Path(text))
