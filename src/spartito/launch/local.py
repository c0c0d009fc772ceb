"""Start a script as the workers of this machine, each with an environment that says who it is."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path

from spartito.cluster import tf_config
from spartito.cluster.spec import NO_RANK, ClusterSpec, is_loopback, split_address
from spartito.device import available_cores
from spartito.errors import UserError
from spartito.launch import machine
from spartito.launch.process import Process
from spartito.launch.supervisor import supervise
from spartito.names import ENV_STRATEGY, ENV_STRATEGY_OPTIONS, RECIPES, STRATEGIES, nearest

MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
"""glibc's settings: keep what tensors free, so that the next step finds its pages in place.

Measured on one thread against glibc's defaults: 1.15 times the steps of a convolutional network,
the same of an MLP, the same peak of memory. With 65536 for both, which gives freed memory back
at once (sharded parameters then weigh what they should), both fall to 0.55 times.
"""


def launch(
    argv: Sequence[str],
    *,
    module: bool = False,
    workers: int | None = None,
    strategy: str | None = None,
    strategy_options: str | None = None,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str | None = None,
    result: bool = False,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run ``argv`` (a script, or with ``module`` a module's name, and its arguments).

    ``workers`` processes start here: one per GPU, or one, when nothing is said. Of ``nnodes``
    machines this is number ``node_rank``, and all meet at ``master_addr`` (host:port). Without
    these a ``TF_CONFIG`` in ``env`` says the same: each of its tasks becomes ``workers``
    processes. ``strategy_options`` is a JSON object. With ``result`` the last line that the
    first process prints to stdout is printed last, without the task's name.

    Answers the job's exit code; raises `UserError` before anything starts.
    """
    variables = dict(os.environ if env is None else env)
    _check_program(argv, module)
    place = _place(variables, nnodes, node_rank, master_addr)
    count = _count_workers(workers, variables)
    _check_strategy(strategy, strategy_options, place.nodes * count)
    for note in _notes(place, count):
        print(f"spartito: note: {note}", file=sys.stderr, flush=True)
    chosen = {ENV_STRATEGY: strategy, ENV_STRATEGY_OPTIONS: strategy_options}
    variables |= {name: value for name, value in chosen.items() if value is not None}
    command = [sys.executable, *(["-m"] if module else []), *argv]
    processes = [
        Process(place.name(local, count), command, environment)
        for local, environment in enumerate(environments(variables, place, count))
    ]
    return supervise(processes, result_of=0 if result else None)


@dataclass(frozen=True, slots=True)
class Place:
    """This launcher's place in the job: the ``node``-th of ``nodes``, which meet at ``host:port``.

    Several launchers may share a machine (two tasks of a `TF_CONFIG` on one host): this one is
    the ``local``-th of ``locals`` there. ``task`` is the one of `TF_CONFIG` that we are, if any.
    """

    node: int
    nodes: int
    host: str
    port: int
    local: int = 0
    locals: int = 1
    task: ClusterSpec | None = None

    @property
    def trains(self) -> bool:
        """Whether what starts here are replicas, not a `TF_CONFIG`'s ps or evaluator."""
        return self.task is None or self.task.rank != NO_RANK

    def name(self, index: int, workers: int) -> str:
        """What the ``index``-th process here is called."""
        if self.task is not None and (workers == 1 or not self.trains):
            return str(self.task.task)
        return f"worker {self.node * workers + index}"


def environments(
    env: Mapping[str, str], place: Place, workers: int, usable: int | None = None
) -> list[dict[str, str]]:
    """The environment of each of the ``workers`` processes: ``env``, and who the process is.

    The names are torchrun's. Cores (``usable``, by default those of this process) are shared
    out as threads, unless ``env`` says otherwise.
    """
    here = place.locals * workers
    cores = available_cores() if usable is None else usable
    defaults = MALLOC | {"OMP_NUM_THREADS": str(max(1, cores // here)), "PYTHONUNBUFFERED": "1"}
    base = defaults | dict(env)
    if not place.trains:
        return [base]  # such a task has no rank: its TF_CONFIG says all, and it is one process
    if place.task is None or workers > 1:
        base.pop(tf_config.VARIABLE, None)
    return [
        base
        | {
            "RANK": str(place.node * workers + index),
            "WORLD_SIZE": str(place.nodes * workers),
            "LOCAL_RANK": str(place.local * workers + index),
            "LOCAL_WORLD_SIZE": str(here),
            "GROUP_RANK": str(place.node),
            "MASTER_ADDR": place.host,
            "MASTER_PORT": str(place.port),
        }
        for index in range(workers)
    ]


def _place(env: Mapping[str, str], nnodes: int, node_rank: int, master_addr: str | None) -> Place:
    """What the arguments say, else what `TF_CONFIG` says, else this machine alone."""
    if nnodes < 1:
        raise UserError(f"--nnodes {nnodes} is less than 1")
    if not 0 <= node_rank < nnodes:
        raise UserError(
            f"--node-rank {node_rank} is out of range: --nnodes {nnodes} allows 0 to {nnodes - 1}"
        )
    if master_addr is not None:
        host, port = split_address(master_addr)
        return Place(node_rank, nnodes, host, port)
    if nnodes > 1:
        raise UserError(
            f"--nnodes {nnodes} needs a place where the machines meet",
            "Give each the address of the first: --master-addr host:29500",
        )
    spec = tf_config.from_tf_config(env)
    if spec is None or spec.rendezvous is None:
        return Place(0, 1, "127.0.0.1", machine.free_port(), task=spec)
    host, port = split_address(spec.rendezvous)
    if spec.rank == NO_RANK:
        return Place(0, 1, host, port, task=spec)
    return Place(spec.rank, spec.num_replicas, host, port, spec.local_rank, spec.local_size, spec)


def _count_workers(workers: int | None, env: Mapping[str, str]) -> int:
    if workers is None:
        return max(1, machine.gpus(env))
    if workers < 1:
        raise UserError(f"--workers {workers} is less than 1")
    return workers


def _check_strategy(strategy: str | None, options: str | None, replicas: int) -> None:
    if strategy is not None and strategy not in STRATEGIES:
        raise UserError(f"{strategy!r} is not a strategy", nearest(strategy, STRATEGIES))
    if strategy == "one_device" and replicas > 1:
        raise UserError(
            f"one_device trains in one process, but {replicas} are asked for",
            "Use --strategy mirrored (one machine) or multi_worker_mirrored, or --workers 1.",
        )
    if options is None:
        return
    try:
        value = json.loads(options)
    except json.JSONDecodeError as error:
        raise UserError(f"--strategy-options {options!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(
            f"--strategy-options {options!r} is not a JSON object",
            "Write the keyword arguments as '{\"name\": value}'.",
        )


def _check_program(argv: Sequence[str], module: bool) -> None:
    name = argv[0]
    if module:
        top = name.partition(".")[0]
        if top not in sys.builtin_module_names and not PathFinder.find_spec(
            top, [str(Path.cwd()), *sys.path]
        ):
            raise UserError(f"there is no module named {top!r}", "Is its package installed?")
        return
    script = Path(name)
    if script.exists():
        return
    beside = [str(p) for p in script.parent.glob("*.py")] if script.parent.is_dir() else []
    close = get_close_matches(name, beside, n=1)
    advice = f"Did you mean {close[0]!r}?" if close else f"The folder we are in is {Path.cwd()}."
    if name in RECIPES:
        advice = f"The recipe of this name starts with: spartito train {name}"
    raise UserError(f"there is no script {name!r}", advice)


def _notes(place: Place, workers: int) -> list[str]:
    """What is allowed, but worth a line."""
    notes = []
    cores = available_cores()
    if place.locals * workers > cores:
        notes.append(f"{place.locals * workers} workers share {cores} cores")
    if place.task is None and place.nodes > 1 and is_loopback(place.host):
        notes.append(
            f"{place.host} is each machine itself, so all {place.nodes} nodes must run on this one"
        )
    return notes
