"""Start a job on a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from spartito.cluster.endpoints import port_range
from spartito.cluster.limits import time_limit
from spartito.cluster.spec import Task
from spartito.errors import TaskLostError, UserError
from spartito.launch.functions.outcome import Ending
from spartito.launch.hosts.plan import check_passed, travelling
from spartito.launch.job import Heading, JobSpec
from spartito.launch.on_ray.actor import Node, TaskActor, checksum_of, versions
from spartito.launch.on_ray.following import Following
from spartito.launch.on_ray.session import Ended, check_fits, connected, is_there, resources
from spartito.launch.processes.launcher import Processes
from spartito.launch.processes.local import defaults
from spartito.launch.processes.process import process_of
from spartito.launch.processes.roles import Roles, task_environment
from spartito.launch.processes.supervisor import supervise
from spartito.names import ENV_NOTICE, ENV_SECRET
from spartito.wire.addresses import address, is_loopback
from spartito.wire.secret import read_secret, with_secret

PATIENT = 2.0
"""Seconds of a wait for resources until it is told."""
CLOSE_SECONDS = 10.0
"""For the actors to end their tasks."""
PLACEMENTS = ("pack", "spread", "strict_pack", "strict_spread")


@dataclass(frozen=True, slots=True, kw_only=True)
class OnRay(Processes):
    """Start the tasks of a job as actors of a Ray cluster, and watch over them from here.

    ``workers`` of the job count those of the cluster; 1 by default. Each task is an actor in one
    placement group, which starts a process; all end with the job, also when this launcher is
    killed. The job's folder has to be on every node, at the same path.

    Args:
        ray: the cluster's address as ``HOST:6379``, or ``"auto"``; None: the one that this program
            is connected to.
        cpus: the CPUs that each task asks of Ray; a worker computes with as many threads.
        gpus: the GPUs of each worker.
        placement: how Ray spreads the tasks over its nodes.
        env: names of variables that the tasks get as well.
        call: a function's call, which the tasks get as `sp.launch.ray` sends it.
        ending: what the function returned or raised.
        log_dir: as `Local` has it.
        log_format: as `Local` has it.
        notice: as `Local` has it.
        yes: as `Local` has it.
        recover: not here.
        min_workers: not here.
        wait: not here.
        restarts: not here.
        result: as `Local` has it.
        environment: as `Local` has it, like the next two.
        private: folders that are removed.
        on_end: as `Local` has it.
    """

    ray: str | None = Heading.RAY.option(
        "Start the tasks as actors of a Ray cluster: its address as HOST:6379, or auto.",
        metavar="ADDRESS",
    )
    cpus: int = Heading.RAY.option("With --ray: the CPUs of each task.", 1, least=1)
    gpus: int = Heading.RAY.option("With --ray: the GPUs of each worker.", 0, least=0)
    placement: str = Heading.RAY.option(
        f"With --ray: how tasks are spread over nodes, one of {', '.join(PLACEMENTS)}.",
        "pack",
        metavar="NAME",
    )
    env: tuple[str, ...] = Heading.MACHINES.option(
        "With --hosts or --ray: a variable that the other machines get too, by its name.",
        (),
        metavar="NAME",
    )
    call: bytes | None = None
    ending: Ending | None = None

    def start(self, job: JobSpec) -> int:
        """As `Launcher.start`; every task is an actor, for which a small process stands here.

        Raises:
            UserError: the cluster or the job cannot be; nothing was started.
            TaskLostError: the cluster had no free resources within ``SPARTITO_TIMEOUT`` seconds.
        """
        if self.recover:
            raise UserError(
                "--recover with --ray: a lost task of a Ray cluster is not replaced",
                "Start the script again; it goes on from its BackupAndRestore.",
            )
        if self.placement not in PLACEMENTS:
            raise UserError(
                f"--placement {self.placement} is unknown", f"Known: {', '.join(PLACEMENTS)}."
            )
        job.program.check()
        env = with_secret(self.variables(job))
        check_passed(self.env, env)
        if self.notice is not None:
            env[ENV_NOTICE] = f"{self.notice:g}"
        roles = job.roles()
        job.choose(roles, env=env)
        ended = Ended()
        with connected(self.ray, ended) as ray, self._actors(ray, roles, env) as actors:
            nodes = self._found(ray, actors, job, env)
            ended.code = self._follow(ray, job, roles, actors, nodes, env)
        return ended.code

    @contextmanager
    def _actors(self, ray: Any, roles: Roles, env: Mapping[str, str]) -> Iterator[list[Any]]:
        """An actor for each task, in a placement group; both end with the block."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles = [self._bundle(task) for task in roles.tasks]
        check_fits(bundles, ray.nodes())
        group = ray.util.placement_group(bundles, strategy=self.placement.upper())
        actors: list[Any] = []
        try:
            self._wait(group, f"{len(bundles)} tasks, one of {resources(bundles[0])}", env)
            kind = ray.remote(TaskActor)
            actors = [
                kind.options(
                    num_cpus=bundle["CPU"],
                    num_gpus=bundle.get("GPU", 0.0),
                    enable_task_events=False,  # nobody asks after each read
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
                ).remote()
                for index, bundle in enumerate(bundles)
            ]
            yield actors
        finally:
            if is_there(ray):  # else all that is left ends with it, and each call waits for long
                closed = [actor.close.remote() for actor in actors]
                if closed:
                    ray.wait(closed, num_returns=len(closed), timeout=CLOSE_SECONDS)
                for actor in actors:
                    ray.kill(actor)
                ray.util.remove_placement_group(group)

    def _wait(self, group: Any, what: str, env: Mapping[str, str]) -> None:
        """Until the cluster has resources; raises `TaskLostError` at the time limit."""
        if group.wait(PATIENT):
            return
        self.say(f"{what}, wait for resources of the Ray cluster")
        limit = time_limit(env=env)
        if not group.wait(limit):
            raise TaskLostError(
                f"the Ray cluster had no resources for {what}, within {limit:g} s",
                "Ask for fewer, or wait longer: SPARTITO_TIMEOUT.",
            )

    def _bundle(self, task: Task) -> dict[str, float]:
        gpus = {"GPU": float(self.gpus)} if self.gpus and task.type in ("worker", "chief") else {}
        return {"CPU": float(self.cpus), **gpus}

    def _found(
        self, ray: Any, actors: Sequence[Any], job: JobSpec, env: Mapping[str, str]
    ) -> list[Node]:
        """Where each actor is; raises `UserError` where its task could not run there."""
        allowed = port_range(env)
        ports = None if allowed is None else (allowed[0], allowed[-1])
        folder = None if self.call is not None else os.getcwd()
        asked = [actor.find.remote(folder, job.argv(), ports) for actor in actors]
        try:
            nodes: list[Node] = ray.get(asked)
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise UserError(
                f"the tasks cannot be actors of this Ray cluster: {lines[-1].strip()}",
                "Spartito has to be installed on every node, with the same Python.",
            ) from error
        check_nodes(nodes, versions(), checksum_of(job.argv()))
        return nodes

    def _follow(
        self,
        ray: Any,
        job: JobSpec,
        roles: Roles,
        actors: Sequence[Any],
        nodes: Sequence[Node],
        env: Mapping[str, str],
    ) -> int:
        """Start the tasks, and watch over the processes here that stand for them."""
        addresses = [address(node.host, node.port) for node in nodes]
        self.warn(job, [node.host for node in nodes if not is_loopback(node.host)], env)
        width = max(len(str(task)) for task in roles.tasks)
        for task, node in zip(roles.tasks, nodes, strict=True):
            self.say(f"{task!s:<{width}}  on node {node}")
        if most := max(node.niceness for node in nodes):
            self.say(
                f"tasks have niceness {most} there, and wait for any other program of their node; "
                "RAY_worker_niceness=0 ray start ... changes that"
            )
        of_tasks = travelling(env, self.env) | {ENV_SECRET: read_secret(env)}
        call = None if self.call is None else ray.put(self.call)

        def start(index: int) -> Any:
            task = roles.tasks[index]
            threads = self.cpus if task.type == "worker" else 1
            own = defaults(threads) | task_environment(of_tasks, roles, addresses, task)
            return actors[index].start.remote(job.argv(), own, call)

        def read(task: str | None, name: str) -> bytes | None:
            index = 0 if task is None else [str(one) for one in roles.tasks].index(task)
            try:
                found: bytes | None = ray.get(actors[index].take.remote(name))
            except ray.exceptions.RayError:  # the node is gone
                return None
            return found

        self.check_folder(job, env)
        with Following(actors, start, ray.get) as following:
            processes = [
                process_of(task, roles, following.command(index), dict(os.environ), remote=True)
                for index, task in enumerate(roles.tasks)
            ]
            return supervise(
                self.logged(processes, job, env),
                result_of=0 if self.result else None,
                private=(*self.private, following.private),
                notice=self.notice,
                sink=self.sink,
                on_end=self.on_end if self.ending is None else partial(self.ending.take, read),
            )


def check_nodes(nodes: Sequence[Node], own: Mapping[str, str], script: str = "") -> None:
    """Raise `UserError` where a task could not run, or would run something else.

    Args:
        nodes: What the actors say of their nodes.
        own: The versions here.
        script: The checksum of the script here.
    """
    for node in nodes:
        if node.problem:
            raise UserError(f"on node {node}: {node.problem}")
        if node.versions != own:
            raise UserError(
                f"node {node} has {_listed(node.versions)}, and here is {_listed(own)}",
                "Install the same on every node.",
            )
        if node.script != script:
            raise UserError(
                f"node {node} has another version of the script than this machine",
                "Share the job's folder with every node, or copy it anew.",
            )


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
