"""The study: two models, synchronous and asynchronous, in containers; even and uneven workers.

    python -m benchmarks.study --data PetImages --out DIR

Runs the jobs of ``examples/containers`` as they are, and once more with worker 1 at a quarter of
a CPU. A run that has finished in DIR is not run again: after a break, give the same command.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import announce
from benchmarks.study_results import DOCS, write_docs, write_results
from spartito.comparison.containers import job_name
from spartito.errors import EXIT_INTERRUPTED, SpartitoError, UserError, show
from spartito.launch.containers.compose import compose_file
from spartito.launch.containers.job import up
from spartito.launch.containers.launcher import Compose
from spartito.launch.containers.plan import IMAGE, Containers
from spartito.launch.job import JobSpec, Program
from spartito.names import ENV_EPOCHS

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "containers"
EVEN, QUARTER = "1", "1,0.25"
"""CPUs of the two workers."""

QUICK_EPOCHS = 2
INTERRUPTED = (129, 130, 143)
"""Exit codes of a job that somebody ended: then the whole study ends."""


@dataclass(frozen=True, slots=True)
class Study:
    """One of the four: ``ps`` servers and a chief of its own, or none of either."""

    model: str
    ps: int = 0

    @property
    def name(self) -> str:
        """As its folder is called."""
        return f"{self.model}_{'asynchronous' if self.ps else 'synchronous'}"

    @property
    def needs_photos(self) -> bool:
        """Whether it reads a folder of the user's; the digits come with the package."""
        return self.model == "cats_vs_dogs"

    def job(self, data: Path | None, name: str, out: Path | None = None, **more: Any) -> Containers:
        """Its job; ``more`` goes to `Compose`, whose errors are raised here too."""
        script = str(EXAMPLES / self.name / "train.py")
        job = JobSpec(
            program=Program.find(script, ("/data",) if self.needs_photos else ()),
            strategy="parameter_server" if self.ps else "multi_worker_mirrored",
            workers=2,
            ps=self.ps,
            chief=bool(self.ps),
            data=str(data) if data and self.needs_photos else None,
            out=out,
            name=name,
        )
        return Compose(**more).plan(job)


STUDIES = (
    Study("cats_vs_dogs"),
    Study("cats_vs_dogs", ps=2),
    Study("digits"),
    Study("digits", ps=1),
)


@dataclass(frozen=True, slots=True)
class Run:
    """A study with the CPUs of its workers."""

    study: Study
    cpus: str

    @property
    def name(self) -> str:
        """As its run folder is called."""
        return self.study.name + ("" if self.cpus == EVEN else "_quarter")


# The short ones first: what is wrong with a machine shows early.
RUNS = tuple(Run(study, cpus) for study in reversed(STUDIES) for cpus in (EVEN, QUARTER))


def main() -> int:
    """Run what has not run yet, then draw all that is there; returns the exit code."""
    given = _parser().parse_args()
    chosen = _chosen(given.only)
    if given.data is None and any(run.study.needs_photos for run in chosen):
        raise UserError(
            "the study of cats and dogs needs photos, and --data names none",
            "Give a folder with a folder Cat and a folder Dog; or --only digits_synchronous.",
        )
    here = announce("The study in containers")
    out = given.out.resolve()
    epochs = QUICK_EPOCHS if given.quick else None
    failed = []
    for run in chosen:
        if is_done(out, run, epochs):
            print(f"{run.name}: has run already", flush=True)
            continue
        code = perform(run, given.data, out, given.image, epochs, here)
        if code in INTERRUPTED:
            return code
        failed += [run.name] if code else []
    there = [run.name for run in RUNS if is_done(out, run, epochs)]
    if there:
        print(write_results(out, there))
        if given.write_docs:
            write_docs(out)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def perform(
    run: Run, data: Path | None, out: Path, image: str, epochs: int | None, here: dict[str, Any]
) -> int:
    """Run one job from its start to its end in ``out``; returns its exit code."""
    folder, file = out / run.name, out / f"{run.name}.yaml"
    name = job_name(f"{out.name}-{run.name}")
    job = run.study.job(data, out=folder, cpus=run.cpus, image=image, name=name)
    if epochs is not None:
        job = replace(job, command=("env", f"{ENV_EPOCHS}={epochs}", *job.command))
    absolute = None if job.data is None or data is None else str(data.resolve())
    scripts = str(EXAMPLES / run.study.name)
    out.mkdir(parents=True, exist_ok=True)
    if folder.exists():  # of a run that was broken off
        shutil.rmtree(folder)
    file.write_text(compose_file(replace(job, out=str(folder), data=absolute, scripts=scripts)))
    print(f"\n{run.name}: CPUs of the workers {run.cpus}", flush=True)
    began = time.monotonic()
    code = up(file)
    seconds = time.monotonic() - began
    print(f"{run.name}: exit code {code} after {seconds:.0f} s", flush=True)
    if code == 0:
        facts = {"epochs": epochs, "cpus": run.cpus, "seconds": seconds, "machine": here}
        _facts_of(out, run).write_text(json.dumps(facts, indent=1) + "\n")
    return code


def is_done(out: Path, run: Run, epochs: int | None) -> bool:
    """Whether ``run`` ended well in ``out``, with the same number of epochs."""
    file = _facts_of(out, run)
    return file.is_file() and json.loads(file.read_text())["epochs"] == epochs


def _facts_of(out: Path, run: Run) -> Path:
    return out / f"{run.name}.json"


def _chosen(names: str | None) -> list[Run]:
    known = {run.name: run for run in RUNS}
    wanted = list(known) if names is None else names.split(",")
    for name in wanted:
        if name not in known:
            raise UserError(f"--only {name} is no run", f"Known: {', '.join(known)}.")
    return [known[name] for name in wanted]


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--data", type=Path, metavar="DIR", help="photos: a folder Cat, a folder Dog")
    made.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results go")
    made.add_argument("--only", metavar="NAMES", help=", ".join(run.name for run in RUNS))
    made.add_argument("--image", default=IMAGE, metavar="NAME", help="what the containers run")
    made.add_argument("--quick", action="store_true", help=f"{QUICK_EPOCHS} epochs: a trial")
    made.add_argument("--write-docs", action="store_true", help=f"put the results into {DOCS}")
    return made


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SpartitoError as error:
        sys.exit(show(error))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
