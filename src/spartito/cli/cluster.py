"""The commands ``spartito cluster``: the same job in containers, Kubernetes, Slurm and clouds."""

from __future__ import annotations

from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any

import typer

from spartito.cli.command import Command, Group
from spartito.cli.options import Arguments, Target, job_of, switch, taken_from, value, with_options
from spartito.errors import UserError
from spartito.launch.clouds.launcher import Dstack, Sky
from spartito.launch.containers.launcher import Compose
from spartito.launch.containers.plan import IMAGE
from spartito.launch.job import JobSpec, Launcher, Program, added_launchers
from spartito.launch.kubernetes.launcher import Kubernetes
from spartito.launch.slurm.launcher import Slurm

cluster_app = typer.Typer(
    cls=Group,
    help="Containers, Kubernetes, Slurm and clouds.\n\n"
    "Example: spartito cluster compose mnist --workers 2 > compose.yaml",
)

FIRST = ("strategy", "workers", "ps", "name", "out", "data")

File = Annotated[Path, typer.Argument(metavar="FILE", help="The job's compose file.")]


@cluster_app.command(cls=Command)
def image(
    context: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder of Spartito's sources.")
    ] = Path(),
    tag: Annotated[str, value("What the image is called.", "NAME")] = IMAGE,
    base: Annotated[
        str | None, value("The image to begin with; python:3.11-slim by default.", "IMAGE")
    ] = None,
    torch_index: Annotated[
        str | None, value("One more index where pip looks for torch.", "URL")
    ] = None,
    network: Annotated[str | None, value("The network of the build, as host.", "NAME")] = None,
    compiler: Annotated[
        bool, switch("--compiler", "With a C++ compiler, which torch.compile needs.")
    ] = False,
) -> None:
    """Build the image that every task runs.

    Example: spartito cluster image --torch-index https://download.pytorch.org/whl/cpu
    """
    from importlib.metadata import version

    from spartito.launch.containers.engine import build_image
    from spartito.launch.images import check_image

    check_image(tag, "--tag")
    if base is not None:
        check_image(base, "--base")
    given = {"BASE": base, "TORCH_INDEX": torch_index, "COMPILER": "1" if compiler else None}
    arguments = {name: value for name, value in given.items() if value is not None}
    raise typer.Exit(build_image(tag, context, version("spartito"), arguments, network))


def _add(name: str, kind: type[Launcher]) -> None:
    """Make a launcher that writes a file the command ``spartito cluster NAME``."""

    def command(target: Target, arguments: Arguments = None, **given: Any) -> None:
        job = job_of(Program.find(target, tuple(arguments or ())), given)
        raise typer.Exit(kind(**taken_from(kind, given)).start(job))

    with_options(JobSpec, kind, first=FIRST, without=("interface",))(command)
    about = (kind.__doc__ or name).partition("\n    Args:")[0]
    cluster_app.command(name, cls=Command, help=cleandoc(about))(command)


def _refuse(name: str, error: UserError) -> None:
    """Make a launcher that cannot be loaded a command that says why, and leaves the others be."""
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}

    @cluster_app.command(name, help="Cannot be loaded.", context_settings=anything)
    def command() -> None:
        raise error


for _name, _kind in {
    "compose": Compose,
    "kubernetes": Kubernetes,
    "slurm": Slurm,
    "sky": Sky,
    "dstack": Dstack,
    **added_launchers(),
}.items():
    if isinstance(_kind, UserError):
        _refuse(_name, _kind)
    else:
        _add(_name, _kind)


@cluster_app.command(cls=Command)
def up(
    file: File,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Do not wait for the end.")
    ] = False,
) -> None:
    """Start the job, follow it to its end and remove its containers; ends with its exit code.

    Example: spartito cluster up compose.yaml
    """
    from spartito.launch.containers import job

    raise typer.Exit(job.up(file, detach))


@cluster_app.command(cls=Command)
def status(
    job: Annotated[
        str,
        typer.Argument(
            metavar="FILE|NUMBER", help="The job's compose file, or its number under Slurm."
        ),
    ],
) -> None:
    """Say how each task goes, of a job in containers or under Slurm.

    Example: spartito cluster status compose.yaml
    """
    from spartito.launch.slurm.status import JOB

    if JOB.fullmatch(job) and not Path(job).exists():
        from spartito.cli import slurm

        raise typer.Exit(slurm.status(job))
    from spartito.launch.containers import job as containers

    raise typer.Exit(containers.status(Path(job)))


@cluster_app.command(cls=Command)
def wait(file: File) -> None:
    """Wait for the end of a job that was started with --detach; ends with its exit code.

    Example: spartito cluster wait compose.yaml
    """
    from spartito.launch.containers import job

    raise typer.Exit(job.wait(file))


@cluster_app.command(cls=Command)
def logs(
    file: File,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the end.")] = False,
) -> None:
    """Print what the tasks printed.

    Example: spartito cluster logs compose.yaml --follow
    """
    from spartito.launch.containers import job

    raise typer.Exit(job.logs(file, follow))


@cluster_app.command(cls=Command)
def down(file: File) -> None:
    """Remove all that up made; the run folder stays.

    Example: spartito cluster down compose.yaml
    """
    from spartito.launch.containers import job

    raise typer.Exit(job.down(file))
