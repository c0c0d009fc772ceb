"""A job in containers from its start to its end: up, logs, status, down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import FrameType

from spartito.errors import EXIT_TASK_LOST, UserError
from spartito.launch.engine import VERSION_LABEL, Engine, JobFile, TaskState, read_job
from spartito.launch.output import Sink

LOOK_SECONDS = 2.0
"""How often we look how the containers go, when none of them has ended."""

PAUSE_SECONDS = 0.1
"""Between two looks at least, whatever ends meanwhile."""

CAUSE_SECONDS = 3.0
"""For the task that failed first, once another says that it lost a peer."""

REST_SECONDS = 15.0
"""For the servers and workers, once the leader has ended well."""

LOST = frozenset(128 + number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP))
"""Exit codes of a container whose task was killed from outside."""


def up(path: Path, detach: bool = False) -> int:
    """Start the job; unless ``detach``, follow it and remove its containers at the end.

    Answers the job's exit code, 69 when a task was lost. Raises `UserError` before anything
    starts where the engine, an image or a folder is missing, or the job is there already.
    """
    job = read_job(path)
    _check_folders(job)
    engine = Engine.find()
    _check_images(engine, job)
    present = engine.states(job)
    if present:
        running = sum(not state.ended for state in present)
        raise UserError(
            f"there is a job {job.name} already: {len(present)} containers, {running} running",
            f"End it with 'spartito cluster down {path}', or choose another --name.",
        )
    _say(f"{job.name}: {len(job.services)} containers")
    try:
        with _interrupts():
            return _run(engine, job, detach)
    except _Interrupted as stop:
        _say(f"stopped by {stop.signal.name}")
        return 128 + stop.signal


def _run(engine: Engine, job: JobFile, detach: bool) -> int:
    stays = False
    try:
        engine.tell(job, "up", "--detach", "--no-build")
        stays = detach
        return 0 if detach else Watch(engine, job).follow()
    finally:
        if not stays:
            engine.down(job)


def status(path: Path) -> int:
    """Print how each task goes; 0 where all are well, 69 where one is lost or missing."""
    job = read_job(path)
    states = {state.service: state for state in Engine.find().states(job)}
    if not states:
        raise UserError(f"no job {job.name} runs here", f"Start it: spartito cluster up {path}")
    width = max(map(len, job.services))
    print(f"{'task':<{width}}  {'status':<10}  {'health':<9}  starts  exit code")
    for service in job.services:
        print(_row(service, states.get(service), width))
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
        raise UserError(f"no job {job.name} runs here", f"Start it: spartito cluster up {path}")
    watch = Watch(engine, job, only_now=not follow)
    watch.read(states)
    try:
        watch.finish(None)
    except KeyboardInterrupt:
        watch.stop()
    return 0


def down(path: Path) -> int:
    """Remove all that `up` made; the run folder stays."""
    job = read_job(path)
    Engine.find().down(job)
    return 0


def verdict(job: JobFile, states: Sequence[TaskState]) -> tuple[int, str] | None:
    """The job's exit code and who decided it; None while it goes on.

    The first task decides when it ends. Before that, so does one that failed for good, unless
    the engine starts it again and the others can do without it: only a lost worker beside
    parameter servers, and an evaluator, are such. When all ended well the code is 0.
    """
    first = next(iter(job.services))
    servers = any(name.startswith("ps-") for name in job.services)
    failed = [
        state
        for state in states
        if state.ended
        and state.code
        and (state.service == first or not _is_dispensable(job, state.service, servers))
    ]
    if failed:
        # Who lost a peer did not fail first, whatever the clock says.
        culprit = min(failed, key=lambda s: (s.code == EXIT_TASK_LOST, s.finished_at))
        return (EXIT_TASK_LOST if culprit.code in LOST else culprit.code), culprit.name
    by_name = {state.service: state for state in states}
    missing = [name for name in job.services if name not in by_name]
    if missing:
        return EXIT_TASK_LOST, missing[0].replace("-", " ")
    waited = [
        state
        for state in states
        if not servers or state.service in (first, "evaluator")
    ]  # fmt: skip
    return (0, by_name[first].name) if all(state.ended for state in waited) else None


def _is_dispensable(job: JobFile, service: str, servers: bool) -> bool:
    if not job.goes_on_without(service):
        return False
    return service == "evaluator" or (servers and not service.startswith("ps-"))


@dataclass
class Watch:
    """Follows the containers of a job: what they print, and how they end."""

    engine: Engine
    job: JobFile
    only_now: bool = False
    sink: Sink = field(default_factory=lambda: Sink.of(sys.stdout.buffer))
    _pen: threading.Lock = field(default_factory=threading.Lock)
    _news: threading.Event = field(default_factory=threading.Event)
    _readers: dict[str, threading.Thread] = field(default_factory=dict)
    _popens: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _last: dict[str, str] = field(default_factory=dict)
    _restarted: dict[str, int] = field(default_factory=dict)

    def follow(self) -> int:
        """Pass on what the tasks print until the job has ended; answers its exit code."""
        try:
            while True:
                self._news.clear()
                states = self.engine.states(self.job)
                self._tell_restarts(states)
                found = verdict(self.job, states)
                if found is not None:
                    return self._end(found)
                self.read(states)
                self._news.wait(LOOK_SECONDS)
                time.sleep(PAUSE_SECONDS)
        finally:
            self.stop()

    def read(self, states: Sequence[TaskState]) -> None:
        """Follow the output of each container that nobody follows, from where we stopped."""
        for place, state in enumerate(states):
            reader = self._readers.get(state.service)
            if reader is not None and (reader.is_alive() or state.status != "running"):
                continue
            self._start(state, place)

    def finish(self, limit: float | None) -> None:
        """Wait until all output has been read, at most ``limit`` seconds."""
        end = None if limit is None else time.monotonic() + limit
        for reader in list(self._readers.values()):
            reader.join(None if end is None else max(0.0, end - time.monotonic()))

    def stop(self) -> None:
        """Follow nobody any more."""
        for popen in self._popens.values():
            popen.terminate()
            popen.wait()
        self.finish(LOOK_SECONDS)

    def _end(self, found: tuple[int, str]) -> int:
        """Wait for what belongs to the end: the first cause, the others' last words."""
        end = time.monotonic() + (REST_SECONDS if found[0] == 0 else CAUSE_SECONDS)
        while time.monotonic() < end:
            states = self.engine.states(self.job)
            self.read(states)
            found = verdict(self.job, states) or found
            if all(state.ended for state in states) or found[0] not in (0, EXIT_TASK_LOST):
                break
            self._news.clear()
            self._news.wait(5 * PAUSE_SECONDS)
        self.finish(LOOK_SECONDS)
        code, name = found
        lost = next((s for s in self.engine.states(self.job) if s.name == name), None)
        if lost is not None and lost.code:
            why = "ran out of memory" if lost.out_of_memory else _how(lost.code)
            _say(f"{name} {why}")
        elif code:
            _say(f"{name} is gone")
        return code

    def _tell_restarts(self, states: Sequence[TaskState]) -> None:
        for state in states:
            if state.starts > self._restarted.get(state.service, 1):
                self._restarted[state.service] = state.starts
                _say(f"{state.name} ended and is started again")

    def _start(self, state: TaskState, place: int) -> None:
        words = [self.engine.docker, "logs", "--timestamps"]
        words += [] if self.only_now else ["--follow"]
        since = self._last.get(state.service)
        words += ["--since", since] if since else []
        popen = subprocess.Popen(
            [*words, state.id],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours
        )
        self._popens[state.service] = popen
        prefix = self.sink.prefix(state.name, place)
        what = (state.service, popen, prefix, since or "")
        reader = threading.Thread(target=self._pass_on, args=what)
        reader.daemon = True
        self._readers[state.service] = reader
        reader.start()

    def _pass_on(
        self, service: str, popen: subprocess.Popen[bytes], prefix: bytes, since: str
    ) -> None:
        assert popen.stdout is not None
        with popen.stdout as lines:
            for line in lines:
                stamp, _, text = line.partition(b" ")
                at = stamp.decode(errors="replace")
                if at <= since:
                    continue  # read before the container was started again
                self._last[service] = at
                with self._pen:
                    self.sink.write([prefix + (text or b"\n")])
        popen.wait()
        self._news.set()


def _check_folders(job: JobFile) -> None:
    """Folders to read must be there; those to write are made, for the user of the container."""
    for folder, only_read, user in job.folders():
        if only_read and not folder.is_dir():
            raise UserError(
                f"{job.path} mounts {folder}, which is no folder",
                "Mend the path; relative ones begin at the file's own folder.",
            )
        if not only_read and not folder.exists():
            try:
                folder.mkdir(parents=True)
                if os.getuid() == 0:
                    owner, _, group = user.partition(":")
                    os.chown(folder, int(owner), int(group or owner))
            except (OSError, ValueError) as error:
                raise UserError(f"the run folder {folder} cannot be made: {error}") from error


def _check_images(engine: Engine, job: JobFile) -> None:
    for image in job.images:
        built = engine.label(image, VERSION_LABEL)
        if built is None:
            raise UserError(
                f"there is no image {image!r} on this machine",
                f"Build it: spartito cluster image --tag {image}",
            )
        if built and built != version("spartito"):
            _say(f"note: the image {image} holds Spartito {built}, here is {version('spartito')}")


def _row(service: str, state: TaskState | None, width: int) -> str:
    if state is None:
        return f"{service:<{width}}  missing"
    code = str(state.code) if state.ended else ""
    return (
        f"{service:<{width}}  {state.status:<10}  {state.health:<9}  {state.starts:>6}  {code:>9}"
    ).rstrip()


def _how(code: int) -> str:
    return f"was killed by signal {code - 128}" if code > 128 else f"failed with exit code {code}"


def _say(text: str) -> None:
    print(f"spartito: {text}", file=sys.stderr, flush=True)


class _Interrupted(BaseException):
    """Somebody wants the job to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


@contextmanager
def _interrupts() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the job, not us before we have cleaned up."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for one in old:
            signal.signal(one, signal.SIG_IGN)
        raise _Interrupted(number)

    old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in old:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in old.items():
            with suppress(TypeError):  # set by a program that is not Python
                signal.signal(number, handler)
