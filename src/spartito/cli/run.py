"""The commands ``spartito run`` and ``spartito train``: they start the processes of a job."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spartito.cli.options import (
    Chief,
    Evaluator,
    Interface,
    Ports,
    Strategy,
    StrategyOptions,
    network,
    whole,
)
from spartito.errors import UserError
from spartito.names import PRECISIONS, RECIPES, nearest, new_run_folder

if TYPE_CHECKING:
    from spartito.launch.hosts.job import Reach

PASS_ON = {"allow_interspersed_args": False}
"""Everything after the script belongs to the script, options too."""


def _precision(text: str) -> str:
    if text not in PRECISIONS:
        raise UserError(f"--precision {text} is unknown", nearest(text, PRECISIONS))
    return text


Workers = Annotated[
    int | None,
    typer.Option(
        help="Processes on each machine; one per GPU, or one, by default.",
        parser=whole("--workers", 1),
        metavar="N",
    ),
]
Servers = Annotated[
    int | None,
    typer.Option(
        "--ps",
        help="Parameter servers of the job; the strategy is then parameter_server.",
        parser=whole("--ps", 1),
        metavar="N",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one last line of JSON.")]
Hosts = Annotated[
    str | None,
    typer.Option(
        help="Several machines, as a,b,node[01-04]: all is started from here, by ssh.",
        metavar="LIST",
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        help="With --hosts: where the first task of a machine listens, 29500 by default; "
        "the next ones follow.",
        parser=whole("--port", 1),
        metavar="N",
    ),
]
SshWords = Annotated[
    str | None,
    typer.Option(
        "--ssh", help="With --hosts: how ssh is called, as 'ssh -p 2222'.", metavar="COMMAND"
    ),
]
RemoteDir = Annotated[
    str | None,
    typer.Option(
        help="With --hosts: the folder on the other machines; by default the same as here.",
        metavar="DIR",
    ),
]
RemotePython = Annotated[
    str | None,
    typer.Option(
        help="With --hosts: the Python of the other machines; by default the same as here.",
        metavar="PATH",
    ),
]
Passed = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        help="With --hosts: a variable that the other machines get too, by its name.",
        metavar="NAME",
    ),
]
LogDir = Annotated[
    Path | None,
    typer.Option(
        help="A folder for what each task prints: worker-0.log and so on, written anew.",
        metavar="DIR",
    ),
]

Yes = Annotated[
    bool, typer.Option("--yes", help="Start far more processes than cores without a question.")
]


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="The script, or with -m the module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS...", help="Its own arguments.")
    ] = None,
    strategy: Strategy = None,
    strategy_options: StrategyOptions = None,
    workers: Workers = None,
    ps: Servers = None,
    evaluator: Evaluator = False,
    chief: Chief = False,
    module: Annotated[bool, typer.Option("-m", help="Run a module, as python -m.")] = False,
    nnodes: Annotated[
        int | None,
        typer.Option(
            help="Machines in the job; 1 for a job of its own inside a scheduler's task.",
            parser=whole("--nnodes", 1),
            metavar="N",
        ),
    ] = None,
    node_rank: Annotated[
        int,
        typer.Option(
            help="Which of them this is, from 0.", parser=whole("--node-rank", 0), metavar="N"
        ),
    ] = 0,
    master_addr: Annotated[
        str | None, typer.Option(help="Where they meet: the first machine.", metavar="HOST:PORT")
    ] = None,
    ports: Ports = None,
    interface: Interface = None,
    hosts: Hosts = None,
    port: Port = None,
    ssh: SshWords = None,
    remote_dir: RemoteDir = None,
    remote_python: RemotePython = None,
    env: Passed = None,
    log_dir: LogDir = None,
    yes: Yes = False,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            help="Let a task run a share of the time only, as worker:1=0.25; for trials.",
            metavar="TASK=SHARE",
        ),
    ] = None,
) -> None:
    """Run your script in several processes.

    Example: spartito run --strategy mirrored --workers 2 train.py --epochs 3
    """
    from spartito.launch.hosts.job import launch_on_hosts
    from spartito.launch.local import launch
    from spartito.launch.throttle import slow_tasks

    words = [script, *(arguments or [])]
    if hint := _misplaced(context, words):
        print(f"spartito: note: {hint}", file=sys.stderr, flush=True)
    reach = reach_of(hosts, port, ssh, remote_dir, remote_python, env)
    if reach is not None:
        by_hand = {
            "--nnodes": nnodes is not None,
            "--node-rank": node_rank > 0,
            "--master-addr": master_addr is not None,
            "--slow": bool(slow),
        }
        if typed := [name for name, given in by_hand.items() if given]:
            raise UserError(
                f"--hosts and {' '.join(typed)} exclude each other",
                "--hosts starts all machines from here; --nnodes starts one of them, by hand.",
            )
        start = partial(launch_on_hosts, words, reach)
    else:
        start = partial(
            launch,
            words,
            nnodes=nnodes,
            node_rank=node_rank,
            master_addr=master_addr,
            slow=slow_tasks(slow or []),
        )
    code = start(
        module=module,
        workers=workers,
        ps=ps or 0,
        evaluator=evaluator,
        chief=chief,
        strategy=strategy,
        strategy_options=strategy_options,
        log_dir=log_dir,
        yes=yes,
        env=network(ports, interface),
    )
    raise typer.Exit(code)


def train(
    recipe: Annotated[str, typer.Argument(help=f"One of {', '.join(RECIPES)}.")],
    strategy: Strategy = None,
    workers: Workers = None,
    ps: Servers = None,
    evaluator: Evaluator = False,
    chief: Chief = False,
    ports: Ports = None,
    interface: Interface = None,
    hosts: Hosts = None,
    port: Port = None,
    ssh: SshWords = None,
    remote_dir: RemoteDir = None,
    remote_python: RemotePython = None,
    env: Passed = None,
    log_dir: LogDir = None,
    yes: Yes = False,
    out: Annotated[Path | None, typer.Option(help="The run folder to write.")] = None,
    epochs: Annotated[
        int | None,
        typer.Option(help="Passes over the data.", parser=whole("--epochs", 1), metavar="N"),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The folder with the data.")] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Examples per step, over all workers.",
            parser=whole("--batch-size", 1),
            metavar="N",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Where all randomness begins.", parser=whole("--seed"), metavar="N"),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help=f"What the forward pass computes in: {' or '.join(PRECISIONS)}.",
            parser=_precision,
            metavar="NAME",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run folder's newest checkpoint.")
    ] = False,
    json: Json = False,
) -> None:
    """Train a built-in recipe; it ends with the paths of the model and the report.

    Example: spartito train mnist --strategy mirrored --workers 2 --epochs 3
    """
    from spartito.cluster.resolver import joined
    from spartito.launch.hosts.job import launch_on_hosts
    from spartito.launch.local import launch

    if recipe not in RECIPES:
        raise UserError(f"{recipe!r} is not a recipe", nearest(recipe, RECIPES))
    if out is None and not resume and (hosts is not None or joined(os.environ) is None):
        out = Path(new_run_folder(recipe))  # all tasks start here: all get the one name
    given = {
        "--out": out,
        "--epochs": epochs,
        "--data": data,
        "--batch-size": batch_size,
        "--seed": seed,
        "--precision": precision,
    }
    arguments = [f"{name}={value}" for name, value in given.items() if value is not None]
    switches = {"--resume": resume, "--json": json}
    arguments += [name for name, on in switches.items() if on]
    words = [f"spartito.recipes.{recipe}", *arguments]
    reach = reach_of(hosts, port, ssh, remote_dir, remote_python, env)
    start = partial(launch, words) if reach is None else partial(launch_on_hosts, words, reach)
    code = start(
        module=True,
        workers=workers,
        ps=ps or 0,
        evaluator=evaluator,
        chief=chief,
        strategy=strategy,
        result=json,
        log_dir=log_dir,
        yes=yes,
        env=network(ports, interface),
    )
    raise typer.Exit(code)


def _misplaced(context: typer.Context, words: list[str]) -> str | None:
    """What to say about an option of ours that stands behind the script, whose it is then.

    None where there is none, or where it was given before the script as well.
    """
    source_of: Any = context.get_parameter_source
    left_out = {
        option
        for parameter in context.command.params
        if parameter.name and source_of(parameter.name).name == "DEFAULT"
        for option in parameter.opts
        if option.startswith("--")
    }
    found = next((word for word in words[1:] if word.partition("=")[0] in left_out), None)
    if found is None:
        return None
    option = found.partition("=")[0]
    return (
        f"{option} behind {words[0]} is the script's own; "
        f"for Spartito write it before: spartito run {option} ... {words[0]}"
    )


def reach_of(
    hosts: str | None,
    port: int | None,
    ssh: str | None,
    folder: str | None,
    python: str | None,
    env: list[str] | None = None,
) -> Reach | None:
    """Which machines take part, None for this one alone; `UserError` for options without any."""
    from spartito.launch.hosts.job import Reach

    if hosts is not None:
        return Reach(hosts, ssh, port, folder, python, tuple(env or ()))
    given = {"--port": port, "--ssh": ssh, "--remote-dir": folder, "--remote-python": python}
    given["--env"] = " ".join(env) if env else None
    if typed := [name for name, value in given.items() if value is not None]:
        raise UserError(f"{' '.join(typed)} without --hosts", "Name the machines: --hosts a,b,c")
    return None
