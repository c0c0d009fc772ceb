"""The command ``spartito doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spartito.cli.options import Interface, Ports, Strategy, StrategyOptions, network, whole
from spartito.cli.run import Hosts, Port, RemoteDir, RemotePython, SshWords, reach_of
from spartito.errors import UserError
from spartito.names import ENV_STRATEGY, ENV_STRATEGY_OPTIONS


def doctor(
    workers: Annotated[
        int | None,
        typer.Option(
            help="Examine so many processes started here, not the cluster we are in; with --hosts "
            "so many on each machine.",
            parser=whole("--workers"),
            metavar="N",
        ),
    ] = None,
    compose: Annotated[
        Path | None,
        typer.Option(help="Examine the tasks of this compose file, in containers.", metavar="FILE"),
    ] = None,
    hosts: Hosts = None,
    ps: Annotated[
        int | None,
        typer.Option(
            "--ps", help="With --hosts: parameter servers.", parser=whole("--ps", 1), metavar="N"
        ),
    ] = None,
    port: Port = None,
    ssh: SshWords = None,
    remote_dir: RemoteDir = None,
    remote_python: RemotePython = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds until it ends, whoever is there.", metavar="SECONDS")
    ] = 10.0,
    ports: Ports = None,
    interface: Interface = None,
    strategy: Strategy = None,
    strategy_options: StrategyOptions = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the report as one line of JSON instead.")
    ] = False,
) -> None:
    """Say whether the tasks of a cluster reach each other; run it on every one of them.

    Example: spartito doctor --hosts a,b
    """
    others = {"--workers": workers is not None, "--hosts": hosts is not None}
    if compose is not None and (typed := [name for name, given in others.items() if given]):
        raise UserError(f"{' '.join(typed)} and --compose exclude each other", "Give one of them.")
    env = network(ports, interface)
    chosen = {ENV_STRATEGY: strategy, ENV_STRATEGY_OPTIONS: strategy_options}
    env |= {name: value for name, value in chosen.items() if value is not None}
    reach = reach_of(hosts, port, ssh, remote_dir, remote_python)
    if reach is not None:
        from spartito.doctor.launch.processes import examine_hosts

        code = examine_hosts(reach, timeout, workers=workers, ps=ps or 0, as_json=json, env=env)
        raise typer.Exit(code)
    if ps is not None:
        raise UserError(f"--ps {ps} without --hosts", "Name the machines: --hosts a,b,c")
    if compose is not None:
        from spartito.doctor.launch.containers import examine_containers

        raise typer.Exit(examine_containers(compose, timeout, as_json=json))
    from spartito.doctor.examination import examine
    from spartito.doctor.launch.processes import examine_here

    if workers is None:
        raise typer.Exit(examine(timeout, as_json=json, env=env))
    raise typer.Exit(examine_here(workers, timeout, as_json=json, env=env))
