"""The options of launchers whose jobs go on when a worker is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from spartito.cluster.recovery import Recovery
from spartito.errors import UserError
from spartito.launch.job import Heading
from spartito.launch.processes.roles import RESTARTS, Roles
from spartito.registry import strategy_info, strategy_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovering:
    """What is said of a lost worker."""

    RESTARTS_ALONE: ClassVar[bool] = False
    """Whether tasks are started again without ``--recover``, too."""

    recover: bool = Heading.RECOVERY.option(
        "Go on when a worker is killed: it is started again, and gets its state from the others.",
        False,
    )
    min_workers: int | None = Heading.RECOVERY.option(
        "With --recover: go on with so many where no replacement comes; by default with all.",
        least=1,
    )
    wait: float | None = Heading.RECOVERY.option(
        "With --recover: seconds for a replacement; 300 by default, 30 where fewer may go on.",
        metavar="SECONDS",
    )
    restarts: int | None = Heading.RECOVERY.option(
        f"With --recover: how often each worker is started again, {RESTARTS} by default.", least=0
    )

    @property
    def recovery(self) -> Recovery | None:
        """How the job goes on when a worker is lost; None: it ends."""
        said = {"min_workers": self.min_workers, "wait": self.wait}
        given = {name: value for name, value in said.items() if value is not None}
        if self.recover:
            return Recovery(**given)  # type: ignore[arg-type]
        if self.restarts is not None and not self.RESTARTS_ALONE:
            given["restarts"] = self.restarts
        for name, value in given.items():
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} {value} without --recover", f"Add --recover, or drop {flag}.")
        return None

    @property
    def restarts_of_each(self) -> int:
        """How often each worker is started again."""
        return RESTARTS if self.restarts is None else self.restarts

    def check_recovers(self, strategy: str, roles: Roles) -> None:
        """Raise where a job that is to go on cannot.

        Args:
            strategy: the name of its strategy.
            roles: its tasks.

        Raises:
            UserError: the strategy cannot go on after a loss, or there are fewer workers.
        """
        recovery = self.recovery
        if recovery is None:
            return
        if not strategy_info(strategy).recovers:
            able = [name for name in strategy_names() if strategy_info(name).recovers]
            raise UserError(
                f"--recover under --strategy {strategy}, which cannot give a new task its state",
                f"Leave it out, or choose {' or '.join(able)}, with two workers at least.",
            )
        least = recovery.min_workers
        if least is not None and least > roles.workers:
            raise UserError(
                f"--min-workers {least} of {roles.workers} workers",
                f"At most as many as there are: --min-workers {roles.workers}.",
            )
        if roles.ps and not roles.chief:
            raise UserError(
                f"--recover under --strategy {strategy} without --chief: worker 0 is the chief, "
                "and cannot be replaced",
                "Add --chief. Workers and servers are started again without --recover, too.",
            )
        if roles.ps and least is not None:
            raise UserError(
                f"--min-workers {least} under --strategy {strategy}",
                "Leave it out: nobody waits for a worker there.",
            )
