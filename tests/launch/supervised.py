"""Real processes: small scripts without torch, started by a supervisor in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DRIVER = """
import json, os, sys
from spartito.launch.processes.process import Patience, Process
from spartito.launch.processes.supervisor import supervise
from spartito.system import IS_LINUX
LEAN = ["-S"] if IS_LINUX else []  # elsewhere there are packages that tasks need
job = json.loads(sys.argv[1])
policies = job["policies"] or [{} for _ in job["files"]]
tasks = [Process(f"worker {i}", [sys.executable, *LEAN, file], dict(os.environ), **policy)
         for i, (file, policy) in enumerate(zip(job["files"], policies, strict=True))]
sys.exit(supervise(tasks, patience=Patience(**job["patience"]), result_of=job["result_of"],
                   private=[job["private"]] if job["private"] else []))
"""
LIMIT = 40.0

WAITS = "import time\nfor _ in range(6000): time.sleep(0.05)\n"
"""For minutes, in short sleeps: python hears of a signal that came just before one at its end."""
TELLS = "import os; print('pid', os.getpid(), flush=True)\n"
SLEEPS = TELLS + WAITS
LEAVES = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(300)'])\n"
    "print('pid', child.pid, flush=True)\n" + TELLS
)
LEAVES_DAEMON = LEAVES.replace("300)'])", "300)'], start_new_session=True)")
GRANDCHILD = LEAVES + WAITS
DAEMON = LEAVES_DAEMON + WAITS


def waits_for(file: str | Path) -> str:
    """The beginning of a script that goes on when there is this file."""
    return f"import os, time\nwhile not os.path.exists({str(file)!r}): time.sleep(0.005)\n"


@dataclass
class Job:
    """A supervisor under test, the pids that its tasks printed, and the lines that were read."""

    popen: subprocess.Popen[bytes]
    pids: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def wait_for_pids(self, count: int) -> None:
        """Read lines until ``count`` tasks said ``pid N``."""
        while len(self.pids) < count:
            self._line()

    def printed(self, words: str) -> str:
        """The next line on stdout that has ``words``; those of several tasks come in any order."""
        while words not in (line := self._line()):
            pass
        return line

    def _line(self) -> str:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline().decode(errors="replace")
        assert line, f"the job ended:\n{''.join(self.lines)}"
        self.lines.append(line)
        self.pids += [int(pid) for pid in re.findall(r"pid (\d+)", line)]
        return line

    def end(self) -> tuple[int, str, str]:
        """The exit code, and the rest of stdout and stderr."""
        out, err = self.popen.communicate(timeout=LIMIT)
        self.pids += [int(pid) for pid in re.findall(rb"pid (\d+)", out)]
        return self.popen.returncode, out.decode(errors="replace"), err.decode(errors="replace")


Start = Callable[..., Job]


@contextmanager
def supervised(folder: Path) -> Iterator[Start]:
    """Starts scripts under a supervisor; at the end nothing of them may be left.

    ``policies`` says how each task is to be treated, by the names of `Process`.
    """
    jobs: list[Job] = []

    def starter(
        *scripts: str,
        result_of: int | None = None,
        private: str | None = None,
        policies: Sequence[Mapping[str, Any]] = (),
        **patience: float,
    ) -> Job:
        files = [folder / f"task{index}.py" for index in range(len(scripts))]
        for file, script in zip(files, scripts, strict=True):
            file.write_text(script)
        job = {
            "files": [str(file) for file in files],
            "patience": patience,
            "result_of": result_of,
            "private": private,
            "policies": policies,
        }
        popen = subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps(job)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        jobs.append(Job(popen))
        return jobs[-1]

    try:
        yield starter
    finally:
        for job in jobs:
            if job.popen.poll() is None:
                job.popen.terminate()
                job.popen.send_signal(signal.SIGCONT)  # it may stand still
            for stream in (job.popen.stdout, job.popen.stderr):
                if stream is not None:
                    stream.close()
            job.popen.wait(LIMIT)
            left = [] if vanished(job.pids) else [pid for pid in job.pids if is_alive(pid)]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            assert not left, "processes are left"


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def stands_still(pid: int) -> bool:
    """Whether the process is stopped by a signal."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def vanished(pids: list[int]) -> bool:
    """Whether all ``pids`` end before the limit."""
    limit = time.monotonic() + LIMIT
    while any(map(is_alive, pids)):
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


def wait_until(holds: Callable[[], bool]) -> None:
    """Until ``holds`` says True; fails at the limit."""
    limit = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.001)


def pid_of(job: Job, index: int) -> int:
    """The pid, among those that were printed, of the task ``index``."""
    script = f"task{index}.py".encode()
    (pid,) = (p for p in job.pids if script in Path(f"/proc/{p}/cmdline").read_bytes())
    return pid
