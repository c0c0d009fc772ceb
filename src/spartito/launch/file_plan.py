"""What the launchers that write a file have in common: a job as a value, and how it is checked.

JobSpec -> check -> Planned -> text        compose: Containers   kubernetes: Pods   clouds: Nodes
"""

from __future__ import annotations

import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from spartito.declared import Declared
from spartito.errors import UserError
from spartito.launch.job import JobSpec
from spartito.launch.processes.roles import Roles
from spartito.names import ENV_STRATEGY, ENV_TIMEOUT, ENV_TLS, plural
from spartito.notes import say
from spartito.registry import default_name, strategy_info

NAMES = {"ps": "parameter server"}
"""What roles are called in a sentence, where that is not their own name."""

LONGEST_OWN = 40
"""Characters of a name that is made of a program's."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A job as a file describes it, checked.

    ``command`` is what every task runs; ``about`` says in a word what that is. A task waits
    ``timeout`` seconds for another; ``insecure`` ones do not encrypt what they send.
    """

    name: str
    about: str
    command: tuple[str, ...]
    strategy: Declared
    roles: Roles
    timeout: float = field(default=300.0, kw_only=True)
    insecure: bool = field(default=False, kw_only=True)

    @property
    def counts(self) -> dict[str, int]:
        """How many of each role the file starts."""
        return self.roles.counts

    @property
    def who(self) -> str:
        """Those, as a sentence has them."""
        return ", ".join(
            plural(count, NAMES.get(role, role)) for role, count in self.counts.items()
        )

    @property
    def meets(self) -> bool:
        """Whether tasks meet at all: an evaluator meets nobody."""
        return sum(task.type != "evaluator" for task in self.roles.tasks) > 1

    @property
    def said(self) -> dict[str, str]:
        """What the environment of every task begins with."""
        return {ENV_STRATEGY: str(self.strategy), ENV_TIMEOUT: f"{self.timeout:g}"}

    @property
    def tls(self) -> dict[str, str]:
        """What it says of TLS: nothing, unless that is left out."""
        return {ENV_TLS: "off"} if self.insecure else {}


P = TypeVar("P")


class FileLauncher(ABC, Generic[P]):
    """A launcher that writes a file, which starts the job elsewhere."""

    __slots__ = ()

    def start(self, job: JobSpec) -> int:
        """Write the file; nothing is written of a job that cannot run so.

        Args:
            job: what is to run.

        Returns:
            0.
        """
        self.write(self.plan(job))
        return 0

    @abstractmethod
    def plan(self, job: JobSpec) -> P:
        """Check the job, before there is a file.

        Args:
            job: what is to run.

        Returns:
            What the file says.

        Raises:
            UserError: the job cannot run so.
        """

    @abstractmethod
    def write(self, planned: P) -> None:
        """Write the file.

        Args:
            planned: what it says.

        Raises:
            UserError: it cannot be written.
        """


def check_apart(strategy: str, roles: Roles, each: str) -> None:
    """Raise where tasks that are each on a machine of their own cannot be.

    Args:
        strategy: the job's.
        roles: its tasks.
        each: what is said of each of them.

    Raises:
        UserError: the strategy is for one machine.
    """
    if roles.workers > 1 and strategy_info(strategy).one_machine:
        raise UserError(
            f"{strategy} is for one machine, and {each}",
            f"Use --strategy {default_name(2, 0)}.",
        )


def check_text(words: Iterable[str]) -> None:
    """Raise `UserError` for a word that no file of text can have."""
    for word in words:
        if word.encode("utf-8", "replace").decode() != word or "\0" in word:
            raise UserError(
                f"{word[:99]!r} is not UTF-8, which the file is", "Write it in other words."
            )


def folder_here(flag: str, text: str, what: str) -> str:
    """What is said where a name in the cluster is that of a folder here; empty where it is not."""
    if not Path(text).exists():
        return ""
    return f"{flag} {text} is {what} there; {text} in the folder we are in does not go along"


def print_file(text: str, notes: Iterable[str] = ()) -> None:
    """Print a file to stdout, after what the user should know of it.

    Raises `UserError` where it cannot be written.
    """
    for said in notes:
        say(said)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        with open(os.devnull, "wb") as nowhere:  # what is left would be tried again at the end
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise UserError(
            f"the file cannot be written: {error.strerror}", "What is there of it is a part."
        ) from error


def name_of(title: str) -> str:
    """What a job is called after its program: small letters, digits and -, a letter first."""
    own = re.sub(r"[^a-z0-9]+", "-", title.lower().removesuffix(".py")).strip("-")
    own = own[:LONGEST_OWN].strip("-")
    return own if own[:1].isalpha() and len(own) > 1 else f"job-{own}".strip("-")
