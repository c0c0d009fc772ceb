"""What the launchers that start processes themselves have in common."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spartito.cluster.recovery import Recovery
from spartito.cluster.secret import insecurity
from spartito.errors import UserError
from spartito.launch.job import JobSpec, option
from spartito.launch.process import Process
from spartito.launch.roles import RESTARTS, Roles
from spartito.names import ENV_RECOVERY, ENV_RUN_DIR
from spartito.registry import strategy_info, strategy_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """What the launchers that start processes themselves have in common."""

    log_dir: Path | None = option(
        "A folder for what each task prints: worker-0.log and so on, written anew.", metavar="DIR"
    )
    yes: bool = option("Start far more processes than cores without a question.", False)
    notice: float | None = option(
        "Seconds until a task that stands still is named; 5 by default.", metavar="SECONDS"
    )
    recover: bool = option(
        "Go on when a worker is killed: it is started again, and gets its state from the others.",
        False,
    )
    min_workers: int | None = option(
        "With --recover: go on with so many where no replacement comes; else all must be there.",
        least=1,
    )
    wait: float | None = option(
        "With --recover: seconds that the others wait for a replacement, 30 by default.",
        metavar="S",
    )
    restarts: int | None = option(
        f"With --recover: how often each worker is started again, {RESTARTS} by default.", least=0
    )
    result: bool = False
    environment: Mapping[str, str] | None = None

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
        recovery = self.recovery
        return env if recovery is None else env | {ENV_RECOVERY: recovery.text}

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
            print(f"spartito: {said}", file=sys.stderr, flush=True)

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

    @property
    def recovery(self) -> Recovery | None:
        """How the job goes on when a worker is lost; None: it ends."""
        said = {"min_workers": self.min_workers, "wait": self.wait}
        given = {name: value for name, value in said.items() if value is not None}
        if self.recover:
            return Recovery(**given)  # type: ignore[arg-type]
        if self.restarts is not None:
            given["restarts"] = self.restarts
        for name, value in given.items():
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} {value} without --recover", f"Add --recover, or drop {flag}.")
        return None

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
        if not strategy_info(strategy).recovers:
            able = [name for name in strategy_names() if strategy_info(name).recovers]
            raise UserError(
                f"--recover under --strategy {strategy}, which cannot give a new task its state",
                f"Leave it out, or choose {' or '.join(able)}, with two workers at least.",
            )
        least = recovery.min_workers
        if least is not None and least > roles.workers:
            raise UserError(f"--min-workers {least} of {roles.workers} workers")
        restarts = RESTARTS if self.restarts is None else self.restarts
        return [
            one if one.outlives else replace(one, restarts=restarts, vital=least is None)
            for one in processes
        ]
