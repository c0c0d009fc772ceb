"""A job for Slurm as one value, and its batch file as one would write it by hand."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spartito.cluster.address_list import ENV_EVALUATOR, ENV_PS
from spartito.declared import Declared
from spartito.errors import EXIT_PREEMPTED, EXIT_TASK_LOST, EXIT_USER
from spartito.launch.processes.local import RUNTIME
from spartito.launch.slurm.values import SIGNAL, Array
from spartito.names import (
    ENV_PORTS,
    ENV_RUN_DIR,
    ENV_SECRET,
    ENV_SECRET_FILE,
    ENV_STRATEGY,
    ENV_TLS,
    plural,
)

if TYPE_CHECKING:
    from spartito.launch.processes.roles import Roles
    from spartito.launch.slurm.launcher import Slurm

NUMBER = "$SLURM_JOB_ID"
INDEX = "$SLURM_ARRAY_TASK_ID"
OF_ARRAY = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
"""A task of an array; the number of the last one of them alone means the whole array."""

RUN_DIR = f'"${ENV_RUN_DIR}"'
"""The run folder as the command names it: the shell puts it in."""

RANDOM = "od -An -vtx1 -N32 /dev/urandom | tr -d ' \\n'"
"""32 random bytes in the shell's words."""

KILLED = (129, 137, 143)
"""How srun says that SIGHUP, SIGKILL or SIGTERM ended a task."""

BIND = '"$(pwd -P)"'
"""The folder of the job, which a container sees as it is; a link to it means nothing there."""

BIND_RUN = f'"$(realpath "${ENV_RUN_DIR}")"'
"""The run folder, which may lie behind a link elsewhere."""

TRAPPED = "HUP INT QUIT ABRT ALRM TERM USR1 USR2 TSTP"
"""What Slurm may send to all processes of a task, so also to the shell around it."""

CODE = "|| code=$?"
"""How the end of ``srun`` is kept, also where ``--setup`` says ``set -e``."""


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A job for Slurm, checked: see `Slurm.plan`.

    ``command`` is what every task runs, in the shell's words. ``out`` is the run folder, of an
    array the folder of its run folders; None means one by the job's number. ``memory`` is in MiB
    for each node. With ``insecure`` tasks do not encrypt what they send. ``signal`` tells the
    tasks that the time is nearly over. ``asked`` has the rest.
    """

    name: str
    about: str
    command: tuple[str, ...]
    strategy: Declared
    roles: Roles
    asked: Slurm
    out: str | None = None
    memory: int | None = None
    ports: range | None = None
    insecure: bool = False
    signal: str | None = None
    array: Array | None = None
    ps_memory: int | None = None

    @property
    def apart(self) -> bool:
        """Whether servers and the evaluator have nodes of their own."""
        return self.asked.ps_nodes is not None

    @property
    def tasks(self) -> int:
        """How many tasks ``srun`` starts."""
        return len(self.roles.tasks)

    @property
    def number(self) -> str:
        """The job, or the task of an array, as ``scontrol`` knows it, in the shell's words."""
        return NUMBER if self.array is None else OF_ARRAY

    @property
    def run_dir(self) -> str:
        """The run folder in the shell's words."""
        if self.out is None:
            return f'"runs/{self.name}-{self.number}"'
        return shlex.quote(self.out) + ("" if self.array is None else f'/"{INDEX}"')


def batch_file(job: BatchJob) -> str:
    """The file that ``sbatch`` takes."""
    return "\n".join(
        [
            "#!/bin/bash",
            *_heading(job),
            *_directives(job),
            "",
            *([*job.asked.setup, ""] if job.asked.setup else []),
            *(f"export {name}={value}" for name, value in _variables(job)),
            "",
            *(_bound(job) if job.asked.restarts else ()),
            *_folder(job),
            *_step(job),
            *_end(job),
            "",
        ]
    )


def _directives(job: BatchJob) -> Iterator[str]:
    """What ``sbatch`` reads."""
    switches = [f"#SBATCH --{'' if job.asked.restarts else 'no-'}requeue"]
    switches += ["#SBATCH --exclusive"] if job.asked.exclusive else []
    yield from (f"#SBATCH --{option}={value}" for option, value in options_of(job))
    yield from switches
    yield from (f"#SBATCH {line}" for line in job.asked.sbatch)
    if job.apart:
        yield ""
        yield "# The other nodes, for what computes no gradients."
        yield "#SBATCH hetjob"
        yield from (f"#SBATCH --{option}={value}" for option, value in _options_apart(job))
        yield from switches


def _heading(job: BatchJob) -> Iterator[str]:
    roles, array = job.roles, job.array
    counts = {"worker": roles.workers, "parameter server": roles.ps}
    counts["evaluator"] = int(roles.evaluator)
    who = ", ".join(plural(count, what) for what, count in counts.items() if count)
    output = f"{job.name}-NUMBER.out" if array is None else f"{job.name}-NUMBER_{array.first}.out"
    commands = {
        f"sbatch {job.name}.sbatch": "submit it; prints the job's number",
        "spartito cluster status NUMBER": "how it goes",
        f"tail -F {output}": "what it prints",
        "scancel NUMBER": "end it",
    }
    width = max(map(len, commands))
    runs = "" if array is None else f"{plural(array.count, 'run')}, each "
    where = plural(job.asked.nodes, "node")
    if job.apart:
        where = f"{where} for workers, {job.asked.ps_nodes} for the others"
    yield f"# {job.about} under {job.strategy}: {runs}{who} on {where}."
    yield "#"
    for command, what in commands.items():
        yield f"#   {command:<{width}}   # {what}"
    yield "#"
    yield "# Paths are relative to the folder where it is submitted."
    if array is None:
        folder = job.out or f"runs/{job.name}-NUMBER"
    else:
        folder = f"{job.out}/INDEX" if job.out else f"runs/{job.name}-NUMBER_INDEX"
        yield f"# A run knows its index by {INDEX}; scancel NUMBER_INDEX ends it alone."
        if array.last > array.USUAL:
            yield f"# Indices above {array.USUAL} need a larger MaxArraySize than Slurm's own."
    yield f"# Model and report: {folder}\n"


def options_of(job: BatchJob) -> Iterator[tuple[str, str | int]]:
    """The options of ``sbatch``, in the order in which people write them."""
    asked, roles = job.asked, job.roles
    here = roles.workers if job.apart else job.tasks
    # Servers and the evaluator come last: in blocks they would have nodes of their own.
    mixed = asked.nodes > 1 and here > roles.workers
    found: dict[str, str | int | None] = {
        "job-name": job.name,
        "array": None if job.array is None else job.array.text,
        "partition": asked.partition,
        "account": asked.account,
        "qos": asked.qos,
        "constraint": asked.constraint,
        "nodes": asked.nodes,
        "ntasks": here,
        "ntasks-per-node": None if here % asked.nodes else here // asked.nodes,
        "distribution": "cyclic" if mixed else None,
        "cpus-per-task": asked.cpus_per_task,
        "mem": None if job.memory is None else f"{job.memory}M",
        "gres": asked.gres,
        "gpus-per-node": asked.gpus_per_node,
        "time": asked.time,
        "signal": job.signal,
        "output": "%x-%j.out" if job.array is None else "%x-%A_%a.out",
        "open-mode": "append",
    }
    return ((name, value) for name, value in found.items() if value is not None)


def _options_apart(job: BatchJob) -> Iterator[tuple[str, str | int]]:
    """The options of the nodes for servers and the evaluator."""
    asked, tasks = job.asked, job.tasks - job.roles.workers
    nodes = asked.ps_nodes or 1
    found: dict[str, str | int | None] = {
        "partition": asked.ps_partition or asked.partition,
        "account": asked.account,
        "qos": asked.qos,
        "nodes": nodes,
        "ntasks": tasks,
        "ntasks-per-node": None if tasks % nodes else tasks // nodes,
        "cpus-per-task": asked.cpus_per_task,
        "mem": None if job.ps_memory is None else f"{job.ps_memory}M",
        "time": asked.time,
        "signal": job.signal,
    }
    return ((name, value) for name, value in found.items() if value is not None)


def _variables(job: BatchJob) -> Iterator[tuple[str, str | int]]:
    """What the tasks find in their environment."""
    yield ENV_STRATEGY, shlex.quote(str(job.strategy))
    if job.roles.ps:
        yield ENV_PS, job.roles.ps
    if job.roles.evaluator:
        yield ENV_EVALUATOR, 1
    if job.insecure:
        yield ENV_TLS, "off"
    if job.ports is not None:
        yield ENV_PORTS, f"{job.ports[0]}-{job.ports[-1]}"
    yield ENV_RUN_DIR, job.run_dir
    yield "OMP_NUM_THREADS", job.asked.cpus_per_task
    yield "PYTHONUNBUFFERED", 1
    if job.asked.container is not None:
        yield "PYTHONNOUSERSITE", 1  # the home is there too, and what it has for another Python
    for name, value in RUNTIME.items():
        yield name, f"${{{name}:-{value}}}"  # sbatch carries the user's own along


def _bound(job: BatchJob) -> Iterator[str]:
    """The end of a job that Slurm itself has put into the queue again and again."""
    yield "restarts=${SLURM_RESTART_COUNT:-0}"
    yield f"if [ $restarts -gt {job.asked.restarts} ]; then"
    yield f'    echo "spartito: restart $restarts, and {job.asked.restarts} are the limit" >&2'
    yield f"    exit {EXIT_TASK_LOST}"
    yield "fi"
    yield ""


def _folder(job: BatchJob) -> Iterator[str]:
    """The run folder, and in it a secret that neither the job's file nor an environment shows."""
    yield f"mkdir -p {RUN_DIR} || exit {EXIT_USER}"
    if job.tasks > 1:
        yield "# The tasks know each other by a secret, in a file that this user alone can read."
        yield f"unset {ENV_SECRET}"
        yield f"turn={NUMBER}-${{SLURM_RESTART_COUNT:-0}} run=$(realpath {RUN_DIR})"
        yield f'rm -f "$run"/.secret-{NUMBER}-* "$run"/.codes-{NUMBER}-*  # of a node that was lost'
        yield 'secret="$run/.secret-$turn" codes="$run/.codes-$turn"'
        yield """trap 'rm -f "$secret" "$codes"' EXIT"""
        yield f'if [ -z "${{{ENV_SECRET_FILE}-}}" ]; then'
        yield f'    (umask 077 && {RANDOM} > "$secret") || exit {EXIT_USER}'
        yield f'    export {ENV_SECRET_FILE}="$secret"'
        yield "fi"
    yield ""


def _step(job: BatchJob) -> Iterator[str]:
    """The one line that starts the tasks."""
    if job.insecure:
        yield "echo 'spartito: insecure: what tasks send is not encrypted (--insecure)' >&2"
    if job.signal is not None:
        yield "# The signal goes to each task. With BackupAndRestore all save one step and end."
        yield "# Without it, and without a handler of the script's own, training goes on."
    # Those who lose a task end by themselves and name it: Slurm is not to kill them before.
    options = [f"--cpus-per-task={job.asked.cpus_per_task}", "--kill-on-bad-exit=0"]
    if job.tasks > 1:
        options.append("--label")
    if job.apart:
        options.append("--het-group=0,1")
    if job.tasks == 1:
        yield "code=0"
        yield " ".join(["srun", *options, *job.command, CODE])
        yield ""
        return
    yield "# srun ends with the largest code. Here that of the first task to fail counts, as the"
    yield f"# others only lost it; and {EXIT_USER} always, a mistake that would be there again."
    yield "export codes"
    yield f"task='trap : {' '.join([TRAPPED, *_further_signal(job)])}"
    yield '"$@"'
    yield "code=$?"
    yield '[ $code = 0 ] || echo $code >> "$codes"'
    yield "exit $code'"
    yield "code=0"
    yield " ".join(["srun", *options, "/bin/bash", "-c", '"$task"', "task", *job.command, CODE])
    yield f'if grep -qsx {EXIT_USER} "$codes"; then'
    yield f"    code={EXIT_USER}"
    yield 'elif [ -s "$codes" ]; then'
    yield '    read -r code < "$codes"'
    yield "fi"
    yield 'rm -f "$secret" "$codes"'
    yield ""


def _further_signal(job: BatchJob) -> Iterator[str]:
    """The number of a signal that ``TRAPPED`` may not name."""
    found = SIGNAL.fullmatch(job.signal or "")
    if found is not None and found["signal"].isdigit():
        yield found["signal"]


def _end(job: BatchJob) -> Iterator[str]:
    """What is made of the exit code of ``srun``."""
    most, tries = job.asked.restarts, job.asked.retries
    lost = '$(wc -l < "$lost")'
    yield f"# A task that was killed is a lost task, whose exit code is {EXIT_TASK_LOST}."
    yield f"case $code in {' | '.join(map(str, KILLED))}) code={EXIT_TASK_LOST} ;; esac"
    if most:
        yield f"# {EXIT_PREEMPTED}: told to end, and all is saved. {EXIT_TASK_LOST}: a lost task."
        yield "# Both go on from the newest backup, when their turn comes again."
        yield f"lost={RUN_DIR}/.lost-{NUMBER}"
        yield "case $code in"
        yield f"    {EXIT_PREEMPTED}) again=$((restarts < {most})) ;;"
        yield f'    {EXIT_TASK_LOST}) echo $restarts >> "$lost"'
        yield f"        again=$((restarts < {most} && {lost} <= {tries})) ;;"
        yield "    *) exit $code ;;"
        yield "esac"
        yield "if [ $again = 1 ]; then"
        yield f'    echo "spartito: $code: restart $((restarts + 1)), of {most} at most" >&2'
        yield f'    scontrol requeue "{job.number}"'
        yield "else"
        yield '    echo "spartito: $code: no restart after $restarts of them" >&2'
        yield "fi"
    yield "exit $code"
