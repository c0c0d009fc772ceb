"""A job in containers from its start to its end: up, logs, status, down."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import FrameType

from spartito.errors import EXIT_TASK_LOST, SpartitoError, UserError
from spartito.launch.containers.compose import STOP_SECONDS
from spartito.launch.containers.engine import Engine, TaskState
from spartito.launch.containers.file import Folder, JobFile, read_job
from spartito.launch.containers.secret import make_secret
from spartito.launch.containers.watch import Watch, how_it_ended, verdict
from spartito.launch.processes.interrupts import ENDING
from spartito.names import aligned
from spartito.notes import say
from spartito.wire.addresses import split_address
from spartito.wire.listening import bound

FALLEN_SECONDS = 5
"""From the request to stop to the kill, for the others once a task failed."""


def up(path: Path, detach: bool = False) -> int:
    """Start the job; unless ``detach``, follow it and remove its containers at the end.

    At the end it says where the run folder is. Returns the job's exit code, 69 when a task was
    lost. Raises `UserError` before anything starts where the engine, an image or a folder is
    missing, or the job is there already.
    """
    job = read_job(path)
    check_folders(job)
    engine = Engine.find()
    check_images(engine, job)
    present = engine.states(job)
    if present:
        running = sum(not state.ended for state in present)
        raise UserError(
            f"there is a job {job.name} already: {len(present)} containers, {running} running",
            f"End it with 'spartito cluster down {path}', or choose another --name.",
        )
    check_ports(job)
    make_folders(job)
    make_secret(job)
    if job.insecurity:
        say(job.insecurity)
    say(f"{job.name}: {len(job.services)} containers")
    try:
        with interrupts() as ignore:
            return _run(engine, job, detach, ignore)
    except Interrupted as stop:
        say(f"stopped by {stop.signal.name}")
        return 128 + stop.signal
    finally:
        _say_folders(job)


def wait(path: Path) -> int:
    """Wait for the end of a job that runs already; returns its exit code.

    Nothing is removed, and an interrupt ends the waiting alone.
    """
    job = read_job(path)
    engine = Engine.find()
    if not engine.states(job):
        raise _not_here(path, job)
    try:
        with interrupts():
            code = Watch(engine, job, silent=True).follow()
    except Interrupted as stop:
        return 128 + stop.signal
    _say_folders(job)
    return code


def _run(engine: Engine, job: JobFile, detach: bool, ignore: Callable[[], None]) -> int:
    stays, patience, failed = False, FALLEN_SECONDS, False
    try:
        try:
            engine.run_compose(job, "up", "--detach", "--no-build", say=say)
            stays = detach
            return 0 if detach else Watch(engine, job).follow()
        finally:
            ignore()  # an interrupt before this is caught below, and none comes after it
    except Interrupted:
        stays, patience = False, STOP_SECONDS
        raise
    except SpartitoError:
        failed = True
        raise
    finally:
        if not stays:
            try:
                engine.down(job, patience)
            except SpartitoError as error:
                if not failed:
                    raise
                say(f"{str(error).partition(chr(10))[0]}; then: spartito cluster down {job.path}")


def status(path: Path) -> int:
    """Print how each task goes, and how the job has ended if it has.

    Returns the exit code of a job that has ended; while it runs 0 where all are well, 69 where
    one is lost or missing.
    """
    job = read_job(path)
    listed = Engine.find().states(job)
    if not listed:
        raise _not_here(path, job)
    states = {state.service: state for state in listed}
    rows = [_row(service, states.get(service)) for service in job.services]
    print("\n".join(aligned([("task", "status", "health", "starts", "exit code"), *rows], (3, 4))))
    if (found := verdict(job, listed)) is not None:
        code, name = found
        print(f"{job.name} has ended: {how_it_ended(job, listed, name) if code else 'all is well'}")
        return code
    well = all(
        name in states and not (states[name].ended and states[name].code) for name in job.services
    )
    return 0 if well else EXIT_TASK_LOST


def logs(path: Path, follow: bool = False) -> int:
    """Print what the tasks have printed, each line with its task's name."""
    job = read_job(path)
    engine = Engine.find()
    states = engine.states(job)
    if not states:
        raise _not_here(path, job)
    watch = Watch(engine, job, only_now=not follow)
    try:
        with interrupts() as ignore:
            try:
                try:
                    watch.read(states)
                    watch.finish(None)
                finally:
                    ignore()
            finally:
                watch.stop()
    except Interrupted as stop:
        return 128 + stop.signal
    return 0


def down(path: Path) -> int:
    """Remove all that `up` made; the run folder stays."""
    job = read_job(path)
    Engine.find().down(job)
    return 0


def check_folders(job: JobFile) -> None:
    """Raise `UserError` for a folder that is not there, or that a container could not use."""
    for folder in job.folders:
        if not folder.written and not folder.path.is_dir():
            raise UserError(
                f"{job.path} mounts {folder.path}, which is no folder",
                "Correct the path; relative ones begin at the file's own folder.",
            )
        if folder.path.exists():
            _check_open(job, folder)


def check_ports(job: JobFile) -> None:
    """On the machine's own network: raise `UserError` where a task could not listen."""
    for name, service in job.services.items():
        spec = job.spec(name)
        if service.get("network_mode") != "host" or spec is None:
            continue
        address = spec.address_of(spec.task)
        if not address or not (spec.is_chief or spec.task.type == "ps"):
            continue
        _, port = split_address(address)
        try:
            bound("", port).close()
        except OSError as error:
            raise UserError(
                f"{name} cannot listen on port {port} of this machine: {error.strerror}",
                f"End the program that has it, or change the port in {job.path}.",
            ) from error


def make_folders(job: JobFile) -> list[Path]:
    """Make the folders to write, for the user of the containers; returns the new ones."""
    made: list[Path] = []
    for folder in job.folders:
        if folder.written and not folder.path.exists():
            above = [path for path in folder.path.parents if not path.exists()]
            try:
                folder.path.mkdir(parents=True)
                if os.getuid() == 0 and folder.owner is not None:
                    os.chown(folder.path, *folder.owner)
            except OSError as error:
                raise UserError(f"the run folder {folder.path} cannot be made: {error}") from error
            made += [folder.path, *above]
            try:
                _check_open(job, folder)
            except UserError:
                for new in made:
                    new.rmdir()
                raise
    return made


def _check_open(job: JobFile, folder: Folder) -> None:
    if not folder.is_open():
        verb = "write into" if folder.written else "read"
        raise UserError(
            f"user {folder.user} of the containers cannot {verb} {folder.path}",
            f"Change its mode or owner, or 'user' in {job.path}.",
        )


def check_images(engine: Engine, job: JobFile) -> None:
    """Raise `UserError` for an image that is missing; note one with another Spartito."""
    for image in job.images:
        built = engine.version_in(image)
        if built and built != version("spartito"):
            say(f"note: the image {image} holds Spartito {built}, here is {version('spartito')}")


def _not_here(path: Path, job: JobFile) -> UserError:
    return UserError(f"no job {job.name} runs here", f"Start it: spartito cluster up {path}")


def _say_folders(job: JobFile) -> None:
    """Where on this machine is what the tasks have written, which they know by another name."""
    for folder in job.folders:
        if folder.written:
            say(f"the run folder is {folder.path}")


def _row(service: str, state: TaskState | None) -> Sequence[str]:
    if state is None:
        return service, "missing", "", "", ""
    # The last health check of a container that has ended says nothing: it may have been stopping.
    code, health = (str(state.code), "") if state.ended else ("", state.health)
    return service, state.status, health, str(state.starts), code


class Interrupted(BaseException):
    """A signal asked for the end of the job."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


@contextmanager
def interrupts() -> Iterator[Callable[[], None]]:
    """Ctrl-C, SIGTERM and a closed terminal raise `Interrupted` in the block, once.

    It gets a function that makes it ignore them, to be called in ``finally`` before it cleans up.
    """

    def ignore() -> None:
        for one in old:
            signal.signal(one, signal.SIG_IGN)

    def interrupt(number: int, frame: FrameType | None) -> None:
        ignore()
        raise Interrupted(number)

    old = {number: signal.getsignal(number) for number in ENDING}
    if old[signal.SIGHUP] == signal.SIG_IGN:  # nohup
        del old[signal.SIGHUP]
    for number in old:
        signal.signal(number, interrupt)
    try:
        yield ignore
    finally:
        for number, handler in old.items():
            with suppress(TypeError):  # set by a program that is not Python
                signal.signal(number, handler)
