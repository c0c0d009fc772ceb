"""What Slurm says of a job that was submitted, and where its run folder is."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spartito.errors import EXIT_PREEMPTED, EXIT_TASK_LOST, EXIT_USER, UserError
from spartito.launch.slurm.values import time_seconds
from spartito.names import ENV_RUN_DIR

JOB = re.compile(r"\d+(?:[_+]\d+)?")
"""A job, ``12_3`` a run of an array, ``12+1`` a component of a heterogeneous job."""
LIMIT = 60.0
FIELD = re.compile(r"(?:^|(?<=\s))([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|$)", re.DOTALL)
RUN_DIR = re.compile(rf"^export {ENV_RUN_DIR}=(.*)$", re.MULTILINE)
GOING = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING")
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")

REASONS = {
    "Priority": "other jobs come first",
    "Resources": "it waits for nodes that are free",
    "BeginTime": "it begins at its time; after a restart Slurm waits two minutes",
    "Dependency": "it waits for another job",
    "JobArrayTaskLimit": "as many runs of the array as may run do",
    "JobHeldUser": "it is held: scontrol release {number}",
    "JobHeldAdmin": "an administrator holds it",
    "PartitionTimeLimit": "its --time is more than the partition allows",
    "PartitionNodeLimit": "its --nodes are more than the partition allows",
    "PartitionConfig": "its partition has no nodes that large, or none at all",
    "BadConstraints": "no nodes are as it asks",
    "ReqNodeNotAvail": "nodes that it needs are down, or reserved",
    "Nodes required for job are DOWN": "nodes that it needs are down, or reserved",
    "QOS": "a limit of its quality of service",
    "Assoc": "a limit of its account",
    "InvalidAccount": "its --account is none",
    "InvalidQOS": "its --qos is none",
}
"""Why a job waits, by how Slurm's word for it begins."""

ENDS = {
    "TIMEOUT": "its time was over: give it more --time, or let it come again by --signal USR1@120",
    "OUT_OF_MEMORY": "it needs more --memory",
    "NODE_FAIL": "a node was lost",
    "PREEMPTED": "its nodes went to another job",
    "CANCELLED": "somebody ended it",
    "DEADLINE": "it could not end before its deadline",
    "BOOT_FAIL": "a node did not start",
}
CODES = {
    EXIT_USER: "a mistake that can be corrected",
    EXIT_TASK_LOST: "a task was lost",
    EXIT_PREEMPTED: "told to end, and all is saved: scontrol requeue {number} goes on",
}


@dataclass(frozen=True, slots=True)
class JobState:
    """One job, run of an array, or component, as Slurm has it.

    Attributes:
        number: How Slurm's commands name it.
        name: Its name.
        state: Slurm's word for how it is.
        reason: Slurm's word for why, or "".
        nodes: Its nodes, in Slurm's short form; "" before it has some.
        elapsed: How long it has run.
        limit: How long it may.
        restarts: How often it came again.
        code: Its exit code.
        signal: The signal that ended it, or 0.
        output: The file of what it printed.
        run_dir: Its run folder, where the batch file says one.
    """

    number: str
    name: str
    state: str
    reason: str
    nodes: str
    elapsed: str
    limit: str
    restarts: int
    code: int
    signal: int
    output: str
    run_dir: Path | None

    @property
    def waits(self) -> bool:
        """Whether it is in the queue."""
        return self.state in WAITING

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self.state not in (*GOING, *WAITING)

    @property
    def seconds(self) -> float:
        """How long it has run in this turn."""
        return float(time_seconds(self.elapsed) or 0) if self.elapsed else 0.0

    @property
    def exit_code(self) -> int:
        """What a command that tells of it ends with: 0 while it is not over."""
        if not self.ended:
            return 0
        return self.code or (0 if self.state == "COMPLETED" else EXIT_TASK_LOST)

    def lines(self) -> list[str]:
        """What there is to say, one thing a line."""
        where = f" on {self.nodes}" if self.nodes else ""
        again = f", restart {self.restarts}" if self.restarts else ""
        time = "" if self.waits else f", {self.elapsed} of {self.limit}"
        found = [f"job {self.number} ({self.name}): {self.state}{where}{time}{again}"]
        if self.waits and self.reason:
            found.append(f"  {self.reason}{self._hint(REASONS, self.reason)}")
        elif self.ended and self.state != "COMPLETED":
            killed = f", signal {self.signal}" if self.signal else ""
            why = self._hint(ENDS, self.state)
            if self.state == "FAILED":
                why = CODES.get(self.code, "").format(number=self.number)
                why = f": {why}" if why else ""
            found.append(f"  exit code {self.code}{killed}{why}")
        if self.output and not self.waits:
            found.append(f"  output: {self.output}")
        if self.run_dir is not None:
            found.append(f"  run folder: {self.run_dir}")
        return found

    def _hint(self, known: Mapping[str, str], word: str) -> str:
        said = next((text for begins, text in known.items() if word.startswith(begins)), "")
        return f": {said.format(number=self.number)}" if said else ""


def job_states(number: str) -> list[JobState]:
    """The job ``number``; of an array and of a heterogeneous job each part.

    Raises:
        UserError: there is no Slurm here, it does not reply, or it knows no such job.
    """
    shown = _scontrol("show", "job", number)
    records = re.split(r"\n\s*\n", shown.strip())
    scripts: dict[str, str] = {}  # runs of an array have one
    found = [_state(record, scripts) for record in records if "JobId=" in record]
    if not found:
        raise _unknown(number)
    return sorted(found, key=lambda job: [int(digits) for digits in re.findall(r"\d+", job.number)])


def _state(record: str, scripts: dict[str, str]) -> JobState:
    fields = {name: value.strip() for name, value in FIELD.findall(record)}
    empty = ("(null)", "None", "N/A", "Unknown")
    fields = {name: "" if value in empty else value for name, value in fields.items()}
    number = fields["JobId"].split()[0]
    if fields.get("ArrayJobId") and fields.get("ArrayTaskId"):
        number = f"{fields['ArrayJobId']}_{fields['ArrayTaskId']}"
    elif fields.get("HetJobId"):
        number = f"{fields['HetJobId']}+{fields.get('HetJobOffset', '0')}"
    code, _, signal = fields.get("ExitCode", "0:0").partition(":")
    return JobState(
        number=number,
        name=fields.get("JobName", ""),
        state=fields["JobState"].split()[0],
        reason=fields.get("Reason", ""),
        nodes=fields.get("NodeList", ""),
        elapsed=fields.get("RunTime", ""),
        limit=fields.get("TimeLimit", ""),
        restarts=int(fields.get("Restarts") or 0),
        code=int(code or 0),
        signal=int(signal or 0),
        output=fields.get("StdOut", ""),
        run_dir=_run_dir(fields, scripts),
    )


def _run_dir(fields: Mapping[str, str], scripts: dict[str, str]) -> Path | None:
    """The run folder that the batch file names; None where it is none of ours, or not shown.

    ``scripts`` keeps the batch files, so that each is asked for once.
    """
    index = fields.get("ArrayTaskId", "")
    if index and not index.isdecimal():
        return None  # runs that wait have one record
    number = fields.get("HetJobId") or fields["JobId"]
    whole = fields.get("ArrayJobId") or number
    if whole not in scripts:
        scripts[whole] = _batch_script(number)
    if not (line := RUN_DIR.search(scripts[whole])):
        return None
    try:
        (path,) = shlex.split(line[1])
    except ValueError:
        return None
    known = {
        "SLURM_ARRAY_JOB_ID": fields.get("ArrayJobId", ""),
        "SLURM_ARRAY_TASK_ID": index,
        "SLURM_JOB_ID": number,
    }
    for name, value in known.items():
        path = path.replace(f"${{{name}}}", value).replace(f"${name}", value)
    return None if "$" in path else Path(fields.get("WorkDir", "")) / path


def _batch_script(number: str) -> str:
    try:
        return _scontrol("write", "batch_script", number, "-")
    except UserError:  # somebody else's
        return ""


def _scontrol(*words: str) -> str:
    """What ``scontrol`` prints; `UserError` where it cannot."""
    if shutil.which("scontrol") is None:
        raise UserError(
            "there is no Slurm here: no program scontrol",
            "Ask on a login node of the cluster; for containers name their compose file.",
        )
    try:
        ended = subprocess.run(
            ["scontrol", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"Slurm does not reply: scontrol {' '.join(words)} took {LIMIT:.0f} s",
            "Ask again later; 'scontrol ping' says how Slurm is.",
        ) from None
    if ended.returncode == 0:
        return ended.stdout
    if "Invalid job id" in ended.stderr + ended.stdout:
        raise _unknown(words[-1])
    said = (ended.stderr.strip().splitlines() or ["it says nothing"])[-1]
    raise UserError(
        f"Slurm does not reply: {said}", "'scontrol ping' says how Slurm is, if it runs here."
    )


def _unknown(number: str) -> UserError:
    return UserError(
        f"Slurm knows no job {number}",
        f"It forgets jobs some minutes after their end: 'sacct -j {number}' may know it still, and "
        "its run folder has the rest.",
    )
