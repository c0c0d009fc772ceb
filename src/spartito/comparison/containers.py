"""A comparison in containers: each run is a job with a compose file of its own, which stays."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from spartito.comparison.plan import Launch, Plan, Planned
from spartito.launch.containers.compose import compose_file
from spartito.launch.containers.engine import Engine
from spartito.launch.containers.launcher import Compose
from spartito.launch.containers.plan import Containers
from spartito.launch.job import JobSpec


@dataclass(frozen=True, slots=True)
class ContainerRunner:
    """Starts runs as jobs in containers; ``jobs`` are by run folder."""

    out: Path
    options: Compose
    jobs: Mapping[str, Containers]

    @classmethod
    def of(cls, plan: Plan, options: Compose) -> ContainerRunner:
        """The jobs of ``plan``; `UserError` for one that cannot be, and where no engine responds.

        All of it is checked here, before the first run starts.
        """
        jobs = {run.folder: job_for(plan, options, run) for run in plan.runs}
        Engine.find().version_in(options.image)
        return cls(plan.out, options, jobs)

    @property
    def facts(self) -> dict[str, str]:
        """What the containers had, for the record's machine."""
        options = self.options
        network = "host network" if options.host_network else "private bridge"
        shared = ", shared IPC" if options.share_ipc else ""
        facts = {"containers": f"image {options.image}, {network}{shared}"}
        facts |= {"cpus of the workers": options.cpus} if options.cpus else {}
        return facts | ({"memory of each task": options.memory} if options.memory else {})

    def prepare(self, planned: Planned) -> Launch:
        """Write the run's compose file; ``spartito cluster up`` runs it and removes all of it."""
        self.out.mkdir(parents=True, exist_ok=True)
        file = self.out / f"{planned.folder}.yaml"
        file.write_text(compose_file(self.jobs[planned.folder]))
        words = [sys.executable, "-m", "spartito", "cluster", "up", "--no-config", str(file)]
        return Launch(words, mixed=True)


def job_for(plan: Plan, options: Compose, planned: Planned) -> Containers:
    """The job that the run ``planned`` is; `UserError` for what cannot run in containers."""
    out, script = plan.out.resolve(), plan.program.script
    most = max(run.workers for run in plan.runs)
    asked = JobSpec(
        program=plan.program_of(planned),
        strategy=str(planned.strategy),
        workers=planned.workers,
        ps=planned.ps,
        data=plan.data,
        out=out / planned.folder,
        name=job_name(f"{out.name}-{planned.folder}"),
    )
    job = replace(options, cpus=_first(options.cpus, planned.workers, most)).plan(asked)
    told = [f"{name}={value}" for name, value in plan.environment.items()]
    # The file lies in the comparison's folder, so that paths from here would be wrong there.
    return replace(
        job,
        command=("env", *told, *job.command) if told else job.command,
        out=str(out / planned.folder),
        data=None if asked.data_folder is None else str(asked.data_folder.resolve()),
        scripts=None if script is None else str(script.resolve().parent),
    )


def job_name(text: str) -> str:
    """``text`` as a name for containers: small letters, digits, - and _."""
    return re.sub(r"[^a-z0-9_-]+", "-", text.lower()).lstrip("-_") or "compare"


def _first(cpus: str | None, workers: int, most: int) -> str | None:
    """Of one number for each worker of the largest run, those of a smaller run."""
    parts = [] if cpus is None else cpus.split(",")
    return ",".join(parts[:workers]) if len(parts) == most else cpus
