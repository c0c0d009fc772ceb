"""What people write for Slurm, checked before it is in a queue: times, signals, GPUs, lines."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from spartito.errors import UserError
from spartito.launch.processes.roles import Roles
from spartito.names import plural
from spartito.registry import is_asynchronous

VALUE = re.compile(r"[A-Za-z0-9_.,:=+@/-]+")
FEATURES = re.compile(r"[A-Za-z0-9_.,:=+@/&|*()\[\]!-]+")
"""A constraint: names of features, joined by ``&``, ``|`` and brackets."""
MOST_SIGNAL_SECONDS = 65535  # Slurm keeps it in 16 bits
MINUTES = re.compile(r"(?P<minutes>\d+)(?::(?P<seconds>[0-5]?\d))?")
HOURS = re.compile(r"(?P<hours>\d+):(?P<minutes>[0-5]?\d):(?P<seconds>[0-5]?\d)")
DAYS = re.compile(
    r"(?P<days>\d+)-(?P<hours>[01]?\d|2[0-3])"
    r"(?::(?P<minutes>[0-5]?\d)(?::(?P<seconds>[0-5]?\d))?)?"
)
SECONDS = {"days": 86_400, "hours": 3_600, "minutes": 60, "seconds": 1}
SIGNAL = re.compile(
    r"(?:(?P<whom>[RB]{1,2}):)?(?P<signal>\d+|(?:SIG)?[A-Z][A-Z0-9]+)(?:@(?P<before>\d+))?"
)
SIGNALS = ("HUP", "INT", "QUIT", "ABRT", "ALRM", "TERM", "USR1", "USR2", "URG", "CONT", "TSTP")
"""Signals that Slurm knows by name and that a script can handle."""

NOT_HANDLED = (signal.SIGKILL, signal.SIGSTOP, 32, 33)
"""Signals that no script can handle; the C library has the last two for itself."""

SIGNAL_SECONDS = 60
"""How long before the end Slurm sends a signal when nothing else is said."""

GRES_GPUS = re.compile(r"gpu(?::[A-Za-z][\w.-]*)?(?::(\d+))?")
GPUS = re.compile(r"(?:[A-Za-z][\w.-]*:)?([1-9]\d*)")

INDICES = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+)(?::(?P<step>\d+))?)?")
MOST_INDEX = 4_000_000
"""The largest index that any Slurm can be set up for."""
SHORTEST = 300
"""Seconds of a time limit from which on tasks get `NOTICE` seconds to save."""
NOTICE = 120
SIF = b"SIF_MAGIC", 32
"""What stands in an image of Apptainer, and where."""

SHORT = {
    "a": "array",
    "A": "account",
    "C": "constraint",
    "J": "job-name",
    "N": "nodes",
    "c": "cpus-per-task",
    "m": "distribution",
    "n": "ntasks",
    "o": "output",
    "p": "partition",
    "q": "qos",
    "t": "time",
}
"""One letter for what the file says itself."""


def time_seconds(text: str) -> int | None:
    """The seconds of a time limit as Slurm writes it; None for no limit, `UserError` if none."""
    if text in ("0", "UNLIMITED", "INFINITE"):
        return None
    for form in (MINUTES, HOURS, DAYS):
        if found := form.fullmatch(text):
            given = found.groupdict(default="0")
            return sum(int(number) * SECONDS[name] for name, number in given.items()) or None
    raise UserError(
        f"--time {text!r} is no time limit",
        "Write minutes (90), hours:minutes:seconds (01:30:00), or days-hours (2-12).",
    )


def check_values(given: Mapping[str, str | None]) -> None:
    """Raise `UserError` for a value of these options (without ``--``) that Slurm could not read."""
    for option, value in given.items():
        form = FEATURES if option == "constraint" else VALUE
        if value is not None and not form.fullmatch(value):
            raise UserError(f"--{option} {value!r} is nothing that Slurm could read")


def check_printable(given: Mapping[str, Path | str | None]) -> None:
    """Raise `UserError` for a name with characters that would end a line of the batch file."""
    for what, value in given.items():
        if value is not None and not str(value).isprintable():
            raise UserError(
                f"{what} {str(value)!r} has characters that cannot be printed",
                "Slurm reads the batch file line by line: give it another name.",
            )


def check_lines(lines: Sequence[str], written: Sequence[str]) -> None:
    """Raise `UserError` for a ``--sbatch`` that is no option, or one that is ``written`` by us."""
    for line in lines:
        words = _words(line)
        if not words or not re.match(r"--?[A-Za-z]", words[0]) or "\n" in line:
            raise UserError(
                f"--sbatch {line!r} is no option of sbatch", "As --sbatch=--mail-type=END."
            )
        name = words[0].lstrip("-").partition("=")[0]
        option = name if words[0].startswith("--") else SHORT.get(name[0], name)
        if option in written:
            raise UserError(
                f"--sbatch {line!r}: this command says --{option} itself",
                "Use the option of this command, or change the file.",
            )


def check_setup(lines: Sequence[str]) -> None:
    """Raise `UserError` for a ``--setup`` that is not one line of a shell script."""
    for line in lines:
        if not line.strip() or "\n" in line:
            raise UserError(f"--setup {line!r} is not one line", "Give --setup once for each.")
        if line.lstrip().startswith("#SBATCH"):
            raise UserError(f"--setup {line!r} comes too late for Slurm", "Use --sbatch for it.")


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:
        return []


def check_gpus(
    strategy: str, gres: str | None, per_node: str | None, nodes: int, roles: Roles
) -> None:
    """Replicas that update together need a GPU each; both options count those of one node."""
    named = [GRES_GPUS.fullmatch(part) for part in (gres or "").split(",")]
    listed = [GPUS.fullmatch(part) for part in per_node.split(",")] if per_node else []
    if None in listed:
        raise UserError(f"--gpus-per-node {per_node!r} is no number of GPUs", "As 2, or a100:2.")
    counts = [int(part[1] or 1) for part in (*named, *listed) if part is not None]
    if listed and any(named):
        raise UserError(
            f"--gres {gres} and --gpus-per-node {per_node} say both how many GPUs a node has",
            "Leave the GPUs out of --gres.",
        )
    here = -(-roles.workers // nodes)
    if counts and sum(counts) < here and not is_asynchronous(strategy):
        option, value = ("gpus-per-node", f"{here}") if per_node else ("gres", f"gpu:{here}")
        raise UserError(
            f"--{option} {per_node or gres} is {plural(sum(counts), 'GPU')} for each node, where "
            f"{here} workers will be",
            f"Write --{option} {value}.",
        )


def check_signal(text: str, limit: int | None) -> None:
    """Raise `UserError` for a signal that cannot be sent, or not within ``limit`` seconds."""
    found = SIGNAL.fullmatch(text)
    name = found["signal"].removeprefix("SIG") if found else ""
    known = 0 < int(name) < 65 if name.isdigit() else name in SIGNALS
    if name.isdigit() and int(name) in NOT_HANDLED:
        raise UserError(
            f"--signal {text}: no script can handle this signal, and no task can save by it",
            "Write one that it can, as USR1@120.",
        )
    if found is None or not known:
        raise UserError(
            f"--signal {text!r} is none that Slurm could send",
            "Write a signal and the seconds before the end, as USR1@120.",
        )
    if "B" in (found["whom"] or ""):
        raise UserError(
            f"--signal {text} goes to the batch script alone, which would end, and all tasks "
            "with it",
            f"Leave the B out: with {text.partition(':')[2]} each task gets the signal.",
        )
    before = int(found["before"] or SIGNAL_SECONDS)
    if before > MOST_SIGNAL_SECONDS:
        raise UserError(
            f"--signal {text}: {before} seconds before the end are too many for Slurm",
            f"It can count to {MOST_SIGNAL_SECONDS}.",
        )
    if limit is not None and before >= limit:
        raise UserError(
            f"--signal {text} comes {before} s before the end, but --time gives only {limit} s",
            "It would come at once: give more time, or a smaller number of seconds.",
        )


def signal_before(limit: int | None) -> str | None:
    """The signal for tasks that save when they get one; None where no limit is known."""
    return None if limit is None else f"USR1@{NOTICE if limit >= SHORTEST else limit // 3}"


@dataclass(frozen=True, slots=True)
class Array:
    """The indices of an array of runs, as ``text`` says them to Slurm."""

    USUAL: ClassVar[int] = 1000
    """The largest index of a Slurm where nothing else is set up."""

    text: str
    first: int
    last: int
    count: int


def parse_array(text: str) -> Array:
    """The runs of ``0-9``, ``1,3,5`` or ``0-90:10%2``; `UserError` for what is no such list."""
    listed, percent, most = text.partition("%")
    indices: set[int] = set()
    for part in listed.split(","):
        found = INDICES.fullmatch(part)
        if found is None:
            raise _no_array(text, f"{part!r} is no index and no range")
        first = int(found["first"])
        last, step = int(found["last"] or first), int(found["step"] or 1)
        if last > MOST_INDEX:
            raise _no_array(text, f"{last} is more than any Slurm allows ({MOST_INDEX})")
        if last < first:
            raise _no_array(text, f"the range {part} runs backwards")
        if step < 1:
            raise _no_array(text, f"the step of {part} is 0")
        if indices & (new := set(range(first, last + 1, step))):
            raise _no_array(text, f"{min(indices & new)} stands there twice")
        indices |= new
    if percent and not (most.isascii() and most.isdigit() and int(most) > 0):
        raise _no_array(text, f"%{most} does not say how many run at a time")
    return Array(text, min(indices), max(indices), len(indices))


def _no_array(text: str, rule: str) -> UserError:
    return UserError(
        f"--array {text!r}: {rule}",
        "Write a range (0-9), a list (1,3,7), a step (0-90:10); %2 after it is two at a time.",
    )


def check_ports(ports: range, array: Array, tasks: int) -> None:
    """Each run has ports of its own, by its index, as runs may share a node."""
    needed = (array.last - array.first + 1) * tasks
    if len(ports) < needed:
        raise UserError(
            f"--ports {ports[0]}-{ports[-1]} are {len(ports)} ports, but --array {array.text} with "
            f"{plural(tasks, 'task')} of each run on a node needs {needed}",
            "Leave --ports out: they follow from the job's number then.",
        )


def check_image(name: str) -> None:
    """Raise `UserError` for what Apptainer could not start on the nodes."""
    path = Path(name)
    if "://" in name:
        raise UserError(
            f"--container {name} would be fetched by each task",
            f"Make a file of it once: apptainer pull image.sif {name}",
        )
    if not path.exists():
        raise UserError(
            f"--container {name}: there is no such file",
            "Make one: apptainer build spartito.sif docker-daemon://spartito:latest",
        )
    if path.is_dir():
        return
    word, where = SIF
    with path.open("rb") as file:
        head = file.read(where + len(word))
    if head[where:] != word:
        raise UserError(
            f"--container {name} is no image of Apptainer", "It is made by apptainer build or pull."
        )
