"""Takes a profile: one process trains for some seconds, then some exchange."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from spartito.cluster.resolver import check_alone
from spartito.errors import UserError
from spartito.launch.job import Program
from spartito.launch.processes.fork_server import gains
from spartito.launch.processes.local import RUNTIME
from spartito.names import (
    ENV_CROWD,
    ENV_EPOCHS,
    ENV_FORK,
    ENV_PROFILE,
    ENV_RUN_DIR,
    ENV_SNAPSHOT_DIR,
    ENV_STRATEGY,
    ENV_STRATEGY_OPTIONS,
)
from spartito.notes import say
from spartito.planning import probe, reference
from spartito.planning.profile import Code, Line, Machine, Profile, source_of
from spartito.planning.reference import overheads
from spartito.system.capacity import memory_limit

NOT_INHERITED = (
    *("TF_CONFIG", "OMP_NUM_THREADS", ENV_EPOCHS, ENV_STRATEGY, ENV_STRATEGY_OPTIONS),
    *(ENV_PROFILE, ENV_CROWD),
    *(ENV_RUN_DIR, ENV_SNAPSHOT_DIR),  # the folders of the user's own trainings
)
LIMIT = 600.0
"""Seconds until the first step and the measurements are over: data sets may take long to open."""
LAST = 10.0
"""Seconds that a script may take to end, once the profile is there."""
LINES = 15
"""Lines of a script's stderr that an error shows."""


def take_profile(
    program: Program,
    data: str | None = None,
    batch_size: int | None = None,
    lines: bool = True,
    crowds: Sequence[int] = (),
) -> Profile:
    """Profile a script or a recipe on this machine.

    Args:
        program: What trains.
        data: A recipe's data.
        batch_size: A recipe's global batch size.
        lines: Whether strategies are tried by sockets, too, as between machines.
        crowds: Numbers of tasks, more than there are cores, of which a step is measured, too.

    Returns:
        The profile.

    Raises:
        UserError: It fails, or never calls `fit`.
    """
    check_alone(os.environ, "spartito plan")
    # With what a job's tasks have, so that memory is kept from step to step as there.
    base = {n: v for n, v in os.environ.items() if n not in NOT_INHERITED} | RUNTIME
    with tempfile.TemporaryDirectory(prefix="spartito-plan-") as name:
        folder = Path(name)
        with _exchanging(folder, base) as exchange:
            told = {ENV_CROWD: ",".join(map(str, crowds))}
            steps = _steps(program, data, batch_size, folder, base | told)
            exchanges = exchange(steps["model"], lines)
    return profile_of(program, steps, exchanges)


def crowds_of(tasks: float, cores: int) -> list[int]:
    """The numbers of tasks of which a step is measured, where a machine may have so many.

    Args:
        tasks: Beside each other.
        cores: Of the machine.

    Returns:
        One task more than cores, and two on each core; none where there is a core for each.
    """
    return [] if tasks <= cores else sorted({cores + 1, 2 * cores})


def profile_of(program: Program, steps: Mapping[str, Any], exchanges: Mapping[str, Any]) -> Profile:
    """What was measured, as a profile.

    Args:
        program: What was profiled.
        steps: As `spartito.training.trials.step_profile` writes them.
        exchanges: As `spartito.planning.probe` does.

    Returns:
        The profile.
    """
    machine = _machine(steps, exchanges)
    found = _profile(program, steps, machine)
    own = {**steps, **exchanges["reference"]}
    small = _profile(program, own, _machine(own, exchanges))
    inside = overheads(small, exchanges["trials"])
    between = overheads(small, exchanges["between"], reference.WORKERS)
    return replace(found, machine=replace(machine, overheads=inside, overheads_between=between))


def _machine(steps: Mapping[str, Any], exchanges: Mapping[str, Any]) -> Machine:
    contention = steps["contention"]
    return Machine(
        cores=steps["cores"],
        memory=memory_limit(),
        shared=Line.through([(x, y) for x, y in exchanges.get("memory", exchanges["sockets"])]),
        sockets=Line.through([(x, y) for x, y in exchanges["sockets"]]),
        copy=exchanges["copy"],
        contention=exchanges["contention"] if contention is None else contention,
        crowds={int(tasks): each for tasks, each in steps["crowds"].items()},
        disk=exchanges["disk"],
        start=steps["started"],
        codes={name: Code(**each) for name, each in exchanges["codes"].items()},
        overheads={},
        overheads_between={},
    )


def _profile(program: Program, steps: Mapping[str, Any], machine: Machine) -> Profile:
    taken = {field.name for field in fields(Profile)}
    activations, scratch = memory_of(steps)
    is_forked = os.environ.get(ENV_FORK) != "0" and gains(program.argv())
    return Profile.of(
        {name: value for name, value in steps.items() if name in taken}
        | {
            "target": program.title,
            "source": source_of(program.script, program.arguments),
            "spartito": version("spartito"),
            "torch": version("torch"),
            "activations": activations,
            "scratch": scratch,
            "fork_saves": steps["fork_saves"] if is_forked else 0,
            "machine": asdict(machine),
        }
    )


def memory_of(steps: Mapping[str, Any]) -> tuple[float, float]:
    """What a training has in memory beside its tensors.

    A process grows with its first steps by gradients, the optimizer's state, what a pass keeps of
    each example, and what an update has in between.

    Args:
        steps: As `spartito.training.trials.step_profile` writes them.

    Returns:
        Bytes for each example, and of an update.
    """
    kept, model = steps["activations"], steps["model"]
    each = kept["bytes"] / max(1, kept["batch"]) + 2 * steps["example_bytes"]
    (few, least), *more = steps["grown"]
    if more and more[0][0] > few:
        each = max(each, Line.through([(few, least), *more]).each)
    rest = least - model["gradients"] - model["optimizer"] - each * few
    return each, max(0.0, rest)


def _steps(
    program: Program,
    data: str | None,
    batch_size: int | None,
    folder: Path,
    base: Mapping[str, str],
) -> dict[str, Any]:
    """What the training's own process writes down before its first epoch."""
    program.check()
    words = program.argv(out=str(folder / "run"), data=data)
    if program.kind == "recipe" and batch_size is not None:
        words = (*words, f"--batch-size={batch_size}")
    file = folder / "steps.json"
    env = {
        **base,
        ENV_PROFILE: str(file),
        ENV_RUN_DIR: str(folder / "run"),
        ENV_STRATEGY: "one_device",
    }
    say(f"profiling {program.title}: one process trains for about ten seconds")
    began = time.monotonic()
    with _started([sys.executable, *words], env) as task:
        code, said = task.end(file)
    if not file.exists():
        if code == 0:
            raise UserError(
                f"{program.title} ended without training: it never calls Trainer.fit",
                "A plan measures the steps of fit; a loop of your own has to be compared: "
                "spartito compare.",
            )
        last = "\n".join(said.strip().splitlines()[-LINES:])
        raise UserError(
            f"{program.title} ended with exit code {code} before it trained:\n{last}",
            "It has to train in one process: python " + " ".join(words),
        )
    found: dict[str, Any] = json.loads(file.read_text())
    whole = time.monotonic() - began
    return {**found, "started": max(0.0, whole - found["seconds"])}


@contextmanager
def _exchanging(
    folder: Path, base: Mapping[str, str]
) -> Iterator[Callable[[Mapping[str, Any], bool], dict[str, Any]]]:
    """What processes of this machine find out about it, with a model that is like the user's.

    They import torch from now on, and measure when they hear of the model.
    """
    file = folder / "exchanges.json"
    with _started([sys.executable, "-m", probe.__name__, str(file)], base) as task:

        def exchange(model: Mapping[str, Any], lines: bool) -> dict[str, Any]:
            say("two processes here exchange, and train a plain model, for about ten seconds")
            told = f"{model['tensors']} {model['parameters']} {int(lines)}\n"
            code, said = task.end(file, told)
            if not file.exists():
                last = "\n".join(said.strip().splitlines()[-LINES:])
                raise UserError(
                    f"two processes of this machine could not exchange (exit code {code}):\n{last}",
                    "Try spartito doctor.",
                )
            found: dict[str, Any] = json.loads(file.read_text())
            return found

        yield exchange


@dataclass(frozen=True, slots=True)
class _Program:
    """A program that runs, and what it says to stderr."""

    popen: subprocess.Popen[bytes]
    stderr: IO[bytes]

    def end(self, until: Path, told: str = "") -> tuple[int, str]:
        """Its exit code and stderr; it hears ``told``, and ends soon after the file is there."""
        assert self.popen.stdin is not None
        with suppress(BrokenPipeError):  # it has ended
            self.popen.stdin.write(told.encode())
            self.popen.stdin.close()
        began, there = time.monotonic(), None
        while self.popen.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(0.1)
            now = time.monotonic()
            there = now if there is None and until.exists() else there
            if there is not None and now - there > LAST:
                break
            if now - began > LIMIT:
                raise UserError(
                    f"it did not come to an end within {LIMIT:.0f} s",
                    "Give it less data, or a profile: --profile p.json.",
                )
        _end(self.popen)
        self.stderr.seek(0)
        return self.popen.returncode, self.stderr.read().decode(errors="replace")


@contextmanager
def _started(words: Sequence[str], env: Mapping[str, str]) -> Iterator[_Program]:
    """A program, which is ended with the block."""
    with tempfile.TemporaryFile() as stderr:
        task = subprocess.Popen(
            words,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
        with task:  # which closes its pipe
            try:
                yield _Program(task, stderr)
            finally:
                _end(task)


def _end(task: subprocess.Popen[bytes]) -> None:
    if task.poll() is None:
        task.terminate()
        try:
            task.wait(LAST)
        except subprocess.TimeoutExpired:
            task.kill()
            task.wait()
