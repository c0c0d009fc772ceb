"""Jobs as the commands ask for them, from options in one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

from spartito.launch.containers.launcher import Compose
from spartito.launch.containers.plan import Containers
from spartito.launch.job import JobSpec, Launcher, Program
from spartito.launch.slurm.file import BatchJob
from spartito.launch.slurm.launcher import Slurm

L = TypeVar("L", bound=Launcher)

LISTS = """
from contextlib import suppress
from pathlib import Path

def listed(text):
    '''The processes that show ``text`` in their command line or environment, as ps lists them.'''
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes()
            if text.encode() in words + (process / "environ").read_bytes():
                found[int(process.name)] = words.replace(b"\\0", b" ").decode()
    return found
"""
"""The beginning of a script that looks for a secret where it must not be."""


def asked(kind: type[L], program: Program, /, **options: Any) -> tuple[L, JobSpec]:
    """A launcher and a job with these ``options``, each with its own."""
    of_job = {one.name for one in fields(JobSpec)}
    own = {name: value for name, value in options.items() if name not in of_job}
    job = {name: value for name, value in options.items() if name in of_job}
    return kind(**own), JobSpec(program=program, **job)


def start(kind: type[L], argv: Sequence[str], *, module: bool = False, **options: Any) -> int:
    """Start a script, or with ``module`` a module; returns the exit code."""
    program = Program(argv[0], tuple(argv[1:]), "module" if module else "script")
    launcher, job = asked(kind, program, **options)
    return launcher.start(job)


def plan_containers(target: str, arguments: Sequence[str] = (), **options: Any) -> Containers:
    """The checked job in containers of ``spartito cluster compose``."""
    launcher, job = asked(Compose, Program.find(target, tuple(arguments)), **options)
    return launcher.plan(job)


def plan_batch(target: str, arguments: Sequence[str] = (), **options: Any) -> BatchJob:
    """The checked job of ``spartito cluster slurm``."""
    launcher, job = asked(Slurm, Program.find(target, tuple(arguments)), **options)
    return launcher.plan(job)
