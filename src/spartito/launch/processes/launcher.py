"""What the launchers that start processes themselves have in common."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spartito.cluster.limits import time_limit
from spartito.errors import UserError
from spartito.folders import check_free
from spartito.launch.job import Heading, JobSpec
from spartito.launch.processes.output import JsonSink, Sink, binary
from spartito.launch.processes.process import Failure, Process, with_logs
from spartito.launch.processes.roles import Roles
from spartito.launch.processes.supervisor import supervise
from spartito.launch.recovery_options import Recovering
from spartito.names import (
    ENV_FORK_SERVER,
    ENV_MIXED,
    ENV_RECOVERY,
    ENV_RUN_DIR,
    ENV_SHARE_DEVICES,
    nearest,
)
from spartito.wire.secret import insecurity


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes(Recovering):
    """What the launchers that start processes themselves have in common."""

    log_dir: Path | None = Heading.OUTPUT.option(
        "A folder for what each task prints: worker-0.log and so on.", metavar="DIR"
    )
    yes: bool = Heading.ADVANCED.option(
        "Start far more processes than cores without a question.", False
    )
    notice: float | None = Heading.OUTPUT.option(
        "Seconds until a task that stands still is named; 5 by default.", metavar="SECONDS"
    )
    log_format: str = Heading.OUTPUT.option(
        "How what tasks print is shown: text, or json for an object a line.",
        "text",
        metavar="FORMAT",
    )
    share_devices: bool = Heading.WORKERS.option(
        "Let tasks share accelerators where there are more tasks than devices.", False
    )
    mixed: bool = Heading.WORKERS.option(
        "Let tasks that update together compute on devices of several kinds.", False
    )
    result: bool = False
    environment: Mapping[str, str] | None = None
    private: tuple[str, ...] = ()
    on_end: Callable[[Failure | None], None] | None = None

    def variables(self, job: JobSpec) -> dict[str, str]:
        """The environment that the tasks get from here.

        Args:
            job: what is to run.

        Returns:
            What they inherit, and what the job says to them.

        Raises:
            UserError: what is said of a lost worker does not go together.
        """
        env = job.environment(os.environ if self.environment is None else self.environment)
        env.pop(ENV_FORK_SERVER, None)  # ours alone
        if self.recovery is not None:
            env |= {ENV_RECOVERY: self.recovery.text}
        asked = {ENV_SHARE_DEVICES: self.share_devices, ENV_MIXED: self.mixed}
        return env | {name: "1" for name, said in asked.items() if said}

    @property
    def sink(self) -> type[Sink]:
        """How lines are shown; raises `UserError` for a format that does not exist."""
        sinks = {"text": Sink, "json": JsonSink}
        if self.log_format not in sinks:
            raise UserError(
                f"--log-format {self.log_format} is unknown", nearest(self.log_format, sinks)
            )
        return sinks[self.log_format]

    def say(self, text: str) -> None:
        """Print a line of the launcher's own.

        Args:
            text: What it says.
        """
        self.sink.pair(binary(sys.stdout), binary(sys.stderr))[1].say(text)

    def check_folder(self, job: JobSpec, env: Mapping[str, str]) -> None:
        """Refuse a run folder that another job has, before its logs are written anew.

        Only who starts a whole job may ask: else its own chief may have the folder by now.

        Args:
            job: what is to run.
            env: what its tasks get.

        Raises:
            UserError: another job has it, which is named.
        """
        if run := job.out or env.get(ENV_RUN_DIR):
            check_free(run)

    def logged(
        self, processes: Sequence[Process], job: JobSpec, env: Mapping[str, str]
    ) -> list[Process]:
        """The processes with a file for what each prints: in the run folder, unless one is named.

        Args:
            processes: all of them; one that is alone has none unless a folder is named.
            job: what is to run.
            env: what its tasks get.

        Returns:
            The same, with their files.

        Raises:
            UserError: the folder that is named cannot be written.
        """
        run = job.out or env.get(ENV_RUN_DIR)
        if self.log_dir is not None or not run or len(processes) == 1:
            return with_logs(processes, self.log_dir)
        try:
            return with_logs(processes, Path(run) / "logs")
        except UserError:  # the tasks say it, who write more there
            return list(processes)

    def warn(self, job: JobSpec, hosts: Sequence[str], env: Mapping[str, str]) -> None:
        """Say in the job's first line what others could do to it, if anything.

        Args:
            job: what is to run.
            hosts: where its tasks listen that others reach.
            env: what its tasks get.

        Raises:
            UserError: the secret or ``SPARTITO_TLS`` of ``env`` cannot be.
        """
        said = insecurity(hosts, env)
        if not said and job.insecure:
            said = "insecure: what tasks send is not encrypted (--insecure)"
        if said:
            self.say(said)

    def stacks(self, job: JobSpec, env: Mapping[str, str]) -> Path | None:
        """Where the stacks of tasks are kept that do not move or lose others.

        Args:
            job: what is to run.
            env: what its tasks get.

        Returns:
            A folder beside their logs, or in the run folder; None where there is neither.
        """
        where = self.log_dir or job.out or env.get(ENV_RUN_DIR)
        return Path(where).resolve() / "stacks" if where else None

    def follow(
        self,
        processes: Sequence[Process],
        job: JobSpec,
        env: Mapping[str, str],
        folder: str | None,
        **more: Any,
    ) -> int:
        """Start the processes, and watch over them to their end.

        Args:
            processes: all of them; the first one prints the result of the job.
            job: what is to run.
            env: what its tasks get.
            folder: a folder of the job that goes with it, beside those of ``private``.
            **more: what else `supervise` is told.

        Returns:
            The exit code of the job.
        """
        return supervise(
            self.logged(processes, job, env),
            result_of=0 if self.result else None,
            private=(*self.private, *([folder] if folder else [])),
            stacks=self.stacks(job, env),
            notice=self.notice,
            on_end=self.on_end,
            sink=self.sink,
            **more,
        )

    def keeps_store(self, roles: Roles) -> bool:
        """Whether the job's store outlives its tasks.

        Args:
            roles: the tasks of the job.

        Returns:
            Whether a task that may be lost would keep it otherwise.
        """
        return self.recovery is not None and not roles.ps

    def recovering(
        self, processes: Sequence[Process], strategy: str, roles: Roles
    ) -> list[Process]:
        """The job's processes, of which workers are started again where that was asked for.

        Args:
            processes: all of them.
            strategy: the name of the job's strategy.
            roles: the tasks of the job.

        Returns:
            The same, with what the loss of each means.

        Raises:
            UserError: the strategy cannot go on after a loss, or there are fewer workers.
        """
        recovery = self.recovery
        if recovery is None:
            return list(processes)
        self.check_recovers(strategy, roles)
        restarts, least = self.restarts_of_each, recovery.min_workers
        if roles.ps:
            return [one if one.outlives else replace(one, restarts=restarts) for one in processes]
        return [
            one
            if one.outlives
            else replace(
                one,
                restarts=restarts,
                vital=least is None,
                gives_up=time_limit(env=one.env),
            )
            for one in processes
        ]
