"""The commands ``spartito cluster``: the same job in containers, and under Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spartito.cli.options import (
    Arguments,
    Chief,
    Evaluator,
    Ports,
    Strategy,
    StrategyOptions,
    Target,
    whole,
)
from spartito.errors import UserError

IMAGE = "spartito"

cluster_app = typer.Typer(
    help="Run a job in containers, or under Slurm.\n\n"
    "Example: spartito cluster compose mnist --workers 2 > compose.yaml",
    no_args_is_help=True,
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="The job's compose file.")]


@cluster_app.command()
def image(
    context: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder of Spartito's sources.")
    ] = Path(),
    tag: Annotated[str, typer.Option(help="What the image is called.", metavar="NAME")] = IMAGE,
    base: Annotated[
        str | None,
        typer.Option(help="The image to begin with; python:3.11-slim by default.", metavar="IMAGE"),
    ] = None,
    torch_index: Annotated[
        str | None,
        typer.Option(help="One more index where pip looks for torch.", metavar="URL"),
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="The network of the build, as host.", metavar="NAME")
    ] = None,
    compiler: Annotated[
        bool, typer.Option("--compiler", help="With a C++ compiler, which torch.compile needs.")
    ] = False,
) -> None:
    """Build the image that every task runs.

    Example: spartito cluster image --torch-index https://download.pytorch.org/whl/cpu
    """
    from importlib.metadata import version

    from spartito.launch.containers.engine import build_image

    given = {"BASE": base, "TORCH_INDEX": torch_index, "COMPILER": "1" if compiler else None}
    arguments = {name: value for name, value in given.items() if value is not None}
    raise typer.Exit(build_image(tag, context, version("spartito"), arguments, network))


@cluster_app.command()
def compose(
    target: Target,
    arguments: Arguments = None,
    strategy: Strategy = None,
    strategy_options: StrategyOptions = None,
    workers: Annotated[
        int,
        typer.Option(help="Containers that compute.", parser=whole("--workers", 1), metavar="N"),
    ] = 1,
    ps: Annotated[
        int, typer.Option("--ps", help="Parameter servers.", parser=whole("--ps", 0), metavar="N")
    ] = 0,
    chief: Chief = False,
    evaluator: Evaluator = False,
    data: Annotated[
        Path | None, typer.Option(help="The data; /data in the containers, read-only.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run folder, runs/NAME by default; /runs there.")
    ] = None,
    gpus: Annotated[bool, typer.Option("--gpus", help="A GPU for each worker.")] = False,
    cpus: Annotated[
        str | None,
        typer.Option(help="CPUs of each worker: 0.5, or 0.5,1 one by one.", metavar="LIST"),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory of each task, as 2g.", metavar="SIZE")
    ] = None,
    image: Annotated[str, typer.Option(help="The image that all run.", metavar="NAME")] = IMAGE,
    name: Annotated[
        str | None, typer.Option(help="What the job is called; by its script.", metavar="JOB")
    ] = None,
    host_network: Annotated[
        bool, typer.Option("--host-network", help="The machine's own network, not a bridge.")
    ] = False,
    share_ipc: Annotated[
        bool, typer.Option("--share-ipc", help="One /dev/shm for all, so that they talk by it.")
    ] = False,
    hosts: Annotated[
        str | None,
        typer.Option(help="Several machines, as a,b,c: a file for each.", metavar="LIST"),
    ] = None,
    into: Annotated[
        Path | None, typer.Option(help="With --hosts: the folder for the files.", metavar="DIR")
    ] = None,
    timeout: Annotated[
        int,
        typer.Option(
            help="Seconds that a task waits for another.", parser=whole("--timeout", 1), metavar="N"
        ),
    ] = 300,
    ports: Ports = None,
) -> None:
    """Write the compose file of a job; redirect it into a file.

    Example: spartito cluster compose mnist --workers 2 -- --epochs 3 > compose.yaml
    """
    from spartito.launch.containers.compose import compose_file, machine_files
    from spartito.launch.containers.plan import plan_containers
    from spartito.launch.containers.secret import secret_name, write_secret

    if (hosts is None) != (into is None):
        raise UserError(
            "--hosts and --into go together: several machines are several files",
            "Write --hosts a,b,c --into DIR.",
        )
    job = plan_containers(
        target,
        arguments or [],
        strategy=strategy,
        strategy_options=strategy_options,
        workers=workers,
        ps=ps,
        chief=chief,
        evaluator=evaluator,
        data=data,
        out=out,
        gpus=gpus,
        cpus=cpus,
        memory=memory,
        image=image,
        name=name,
        host_network=host_network,
        share_ipc=share_ipc,
        hosts=hosts,
        timeout=timeout,
        ports=ports,
    )
    if into is None:
        typer.echo(compose_file(job), nl=False)
        return
    into.mkdir(parents=True, exist_ok=True)
    for machine, text in machine_files(job).items():
        path = into / f"{machine}.yaml"
        path.write_text(text)
        typer.echo(f"{machine:<12} {path}")
    if job.meets:
        secret = into / secret_name(job.name)
        write_secret(secret)
        typer.echo(f"{'all':<12} {secret}")


@cluster_app.command()
def slurm(
    target: Target,
    arguments: Arguments = None,
    strategy: Strategy = None,
    strategy_options: StrategyOptions = None,
    nodes: Annotated[
        int,
        typer.Option(help="Machines that Slurm gives.", parser=whole("--nodes", 1), metavar="N"),
    ] = 1,
    workers: Annotated[
        int,
        typer.Option(
            help="Tasks that compute, over all nodes.", parser=whole("--workers", 1), metavar="N"
        ),
    ] = 1,
    ps: Annotated[
        int, typer.Option("--ps", help="Parameter servers.", parser=whole("--ps", 0), metavar="N")
    ] = 0,
    evaluator: Evaluator = False,
    partition: Annotated[
        str | None, typer.Option(help="The partition of the nodes.", metavar="NAME")
    ] = None,
    account: Annotated[
        str | None, typer.Option(help="The account that pays.", metavar="NAME")
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="The time limit, as 01:00:00.", metavar="TIME")
    ] = None,
    qos: Annotated[str | None, typer.Option(help="The quality of service.", metavar="NAME")] = None,
    constraint: Annotated[
        str | None, typer.Option(help="Features of the nodes, as a100&nvlink.", metavar="LIST")
    ] = None,
    exclusive: Annotated[
        bool, typer.Option("--exclusive", help="Nodes that no other job shares.")
    ] = False,
    gres: Annotated[
        str | None, typer.Option(help="What each node must have, as gpu:1.", metavar="LIST")
    ] = None,
    gpus_per_node: Annotated[
        str | None, typer.Option(help="GPUs of each node, as 2 or a100:2.", metavar="N")
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(help="A further option of sbatch, as --mail-type=END.", metavar="OPTION"),
    ] = None,
    ports: Ports = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(help="A line of the shell before it starts, as 'module load cuda'."),
    ] = None,
    signal: Annotated[
        str | None,
        typer.Option(
            help="A signal for each task before the time is over, as USR1@120.", metavar="SIGNAL"
        ),
    ] = None,
    cpus_per_task: Annotated[
        int,
        typer.Option(help="CPUs of each task.", parser=whole("--cpus-per-task", 1), metavar="N"),
    ] = 1,
    memory: Annotated[
        str | None, typer.Option(help="Memory of each node, as 8g.", metavar="SIZE")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What the job is called; by its script.", metavar="JOB")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run folder; runs/NAME-NUMBER by default.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The folder with the recipe's data.")] = None,
    python: Annotated[
        str | None, typer.Option(help="The nodes' Python; this one by default.", metavar="PATH")
    ] = None,
) -> None:
    """Write the batch file of a Slurm job; redirect it into a file.

    Example: spartito cluster slurm mnist --nodes 2 --workers 4 -- --epochs 3 > job.sbatch
    """
    from spartito.launch.slurm import batch_file, plan_batch

    job = plan_batch(
        target,
        arguments or [],
        strategy=strategy,
        strategy_options=strategy_options,
        nodes=nodes,
        workers=workers,
        ps=ps,
        evaluator=evaluator,
        partition=partition,
        account=account,
        time=time,
        qos=qos,
        constraint=constraint,
        exclusive=exclusive,
        gres=gres,
        gpus_per_node=gpus_per_node,
        lines=sbatch or [],
        setup=setup or [],
        ports=ports,
        signal=signal,
        cpus_per_task=cpus_per_task,
        memory=memory,
        name=name,
        out=out,
        data=data,
        python=python,
    )
    typer.echo(batch_file(job), nl=False)


@cluster_app.command()
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


@cluster_app.command()
def status(file: File) -> None:
    """Say how each task goes.

    Example: spartito cluster status compose.yaml
    """
    from spartito.launch.containers import job

    raise typer.Exit(job.status(file))


@cluster_app.command()
def wait(file: File) -> None:
    """Wait for the end of a job that was started with --detach; ends with its exit code.

    Example: spartito cluster wait compose.yaml
    """
    from spartito.launch.containers import job

    raise typer.Exit(job.wait(file))


@cluster_app.command()
def logs(
    file: File,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the end.")] = False,
) -> None:
    """Print what the tasks printed.

    Example: spartito cluster logs compose.yaml --follow
    """
    from spartito.launch.containers import job

    raise typer.Exit(job.logs(file, follow))


@cluster_app.command()
def down(file: File) -> None:
    """Remove all that up made; the run folder stays.

    Example: spartito cluster down compose.yaml
    """
    from spartito.launch.containers import job

    raise typer.Exit(job.down(file))
