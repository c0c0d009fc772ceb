"""The launcher of jobs in Kubernetes: it checks what is asked for and writes the file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from spartito.cluster.endpoints import parse_range
from spartito.cluster.recovery import Recovery
from spartito.errors import UserError
from spartito.launch.containers.plan import IMAGE
from spartito.launch.fetch import SCHEMES, path_of
from spartito.launch.file_plan import (
    FileLauncher,
    check_apart,
    check_text,
    folder_here,
    name_of,
    print_file,
)
from spartito.launch.images import check_image
from spartito.launch.job import JobSpec, check_folders_of_recipe, option
from spartito.launch.kubernetes.file import image_of_nobody, job_file, needs
from spartito.launch.kubernetes.plan import KINDS, PORT, Pods
from spartito.launch.kubernetes.tpus import TpuSlice, parse_tpu
from spartito.launch.kubernetes.values import (
    LONGEST,
    SERVICE,
    SUFFIX,
    check_label,
    check_memory,
    check_name,
    quantity,
)
from spartito.launch.processes.roles import RESTARTS, Roles
from spartito.launch.recovery_options import Recovering
from spartito.names import nearest
from spartito.urls import is_remote

MOST_SCRIPT = 1 << 20
"""Bytes that a ConfigMap may have."""

WAIT = 600.0
"""Seconds for a replacement: a pod has to be scheduled, and its image fetched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubernetes(Recovering, FileLauncher[Pods]):
    """Write the file of a job for Kubernetes; redirect it into a file.

    Example: spartito cluster kubernetes mnist --workers 4 -- --epochs 3 > job.yaml

    Args:
        kind: ``job``, ``jobset`` or ``trainjob``.
        image: what all run.
        pull_secret: the Secret by which nodes pull it.
        gpus: whether each worker gets a GPU.
        tpu: the slice of TPUs in GKE on which the job runs, as ``v5e:4x4``: a pod for each host of
            it, and a worker for each device that torch sees.
        slices: how many such slices compute together.
        cpus: the CPUs of each pod, as Kubernetes writes them: ``2``, ``500m``.
        memory: the memory of each pod, as ``4Gi``.
        queue: the queue of Kueue that admits the job.
        namespace: where it runs; the one of kubectl by default.
        storage: the size of the claim of the run folders.
        storage_class: its class.
        timeout: how long a task waits for another, in seconds.
        recover: whether a worker that is killed is started again, and gets its state from the
            others, which go on.
        min_workers: how many go on at least where no replacement comes; None: all.
        wait: seconds for a replacement; 600 by default.
        restarts: how often each task is started again after a failure that counts; 3 by default.
    """

    RESTARTS_ALONE: ClassVar[bool] = True

    kind: str = option(
        "job (Indexed Jobs), jobset, or trainjob (Kubeflow's trainer).", "job", metavar="KIND"
    )
    image: str = option("The image that all run.", IMAGE, metavar="NAME")
    pull_secret: str | None = option(
        "The Secret by which nodes pull the image from its registry.", metavar="NAME"
    )
    gpus: bool = option("A GPU for each worker.", False)
    tpu: str | None = option(
        "The slice of TPUs in GKE, as v5e:4x4; a worker for each of its devices.", metavar="SLICE"
    )
    slices: int = option("With --tpu: how many such slices compute together.", 1, least=1)
    cpus: str = option("CPUs of each pod, as 2 or 500m.", "2", metavar="N")
    memory: str = option("Memory of each pod, as 4Gi.", "4Gi", metavar="SIZE")
    queue: str | None = option("The queue of Kueue that admits the job.", metavar="NAME")
    namespace: str | None = option("The namespace; kubectl's own by default.", metavar="NAME")
    storage: str = option("Size of the claim of the run folders.", "10Gi", metavar="SIZE")
    storage_class: str | None = option("The class of that claim.", metavar="NAME")
    timeout: int = option("Seconds that a task waits for another.", 600, least=1)
    restarts: int | None = option(
        f"How often each task is started again after a failure that counts, {RESTARTS} by default.",
        least=0,
    )

    def write(self, planned: Pods) -> None:
        """As `FileLauncher.write`: print it, after what is to be there."""
        claims = {"--out": planned.out, "--data": planned.data}
        notes = [folder_here(flag, name, "a claim") for flag, name in claims.items() if name]
        notes.append(image_of_nobody(planned))
        if planned.asked.queue is not None:
            notes.append(
                f"the queue {planned.asked.queue} has to admit {needs(planned)}; it was not asked"
            )
        print_file(job_file(planned), filter(None, notes))

    def plan(self, job: JobSpec) -> Pods:
        program, roles = job.program, job.roles()
        if self.kind not in KINDS:
            raise UserError(f"--kind {self.kind!r} is no kind of job", nearest(self.kind, KINDS))
        tpu = None if self.tpu is None else parse_tpu(self.tpu)
        if tpu is None:
            self._check_no_tpu()
            strategy = job.choose(roles)
        else:
            tasks = self._check_tpu(job, tpu)
            strategy = job.choose(Roles(tasks), here=tpu.tasks)
            roles = Roles(tpu.hosts * self.slices)
        check_apart(strategy.name, roles, "each pod is a machine of its own")
        recovery = self._recovery(strategy.name, roles)
        self._check_values(roles)
        check_folders_of_recipe(program, "kubernetes")
        name = job.name or name_of(program.title)
        data, url, told = _data(job.data)
        script = None if program.script is None else _script(program.script)
        there = None if script is None else f"/scripts/{script[0]}"
        planned = Pods(
            name=name,
            about=program.title,
            command=(*_start(tpu), *program.argv(there, out=f"/runs/{name}", data=told)),
            strategy=strategy,
            roles=roles,
            asked=self,
            script=script,
            out=None if job.out is None else _claim("--out", str(job.out)),
            data=data,
            url=url,
            tpu=tpu,
            timeout=self.timeout,
            port=PORT if job.ports is None else parse_range(job.ports, "--ports")[0],
            insecure=job.insecure,
            recovery=recovery,
        )
        _check_names(planned)
        if self.queue is not None and self.kind == "job" and len(planned.counts) > 1:
            raise UserError(
                f"--queue {self.queue} with --kind job and {' and '.join(planned.counts)}: these "
                "are several Jobs, and Kueue admits each by itself",
                "Use --kind jobset, which it admits as a whole.",
            )
        check_text((*planned.command, *(script or ())))
        return planned

    def _recovery(self, strategy: str, roles: Roles) -> Recovery | None:
        """How the job goes on without a worker; raises `UserError` where it cannot."""
        recovery = self.recovery
        if recovery is None:
            return None
        if roles.ps:
            raise UserError(
                "--recover with parameter servers in Kubernetes",
                "Leave it out: workers and servers are started again without it, and all go on "
                "from the newest backup when the chief is lost.",
            )
        self.check_recovers(strategy, roles)
        if self.kind == "job":
            raise UserError(
                "--recover with --kind job, where nothing ends the pod that keeps the store",
                "Use --kind jobset or trainjob. Without it the tasks go on from the newest backup.",
            )
        if roles.workers < 2:
            return None
        return recovery if self.wait is not None else Recovery(recovery.min_workers, WAIT)

    def _check_no_tpu(self) -> None:
        if self.slices != 1:
            raise UserError(
                f"--slices {self.slices} without --tpu", "Name the slice: --tpu v5e:4x4"
            )

    def _check_tpu(self, job: JobSpec, tpu: TpuSlice) -> int:
        """The workers of a job on TPUs; raises `UserError` where it cannot be."""
        asked = f"--tpu {tpu.name}"
        if self.kind == "trainjob" or (self.kind == "job" and self.slices > 1):
            several = f" and --slices {self.slices}" if self.slices > 1 else ""
            raise UserError(f"--kind {self.kind} with {asked}{several}", "Use --kind jobset.")
        if self.slices > 1 and tpu.hosts == 1:
            raise UserError(
                f"--slices {self.slices} of {tpu.name}, which is one host: GKE joins slices of "
                "several hosts only",
                "Take a larger topology.",
            )
        beside = [*job.roles().asked.split(), "--gpus" if self.gpus else ""]
        beside += ["--recover" if self.recover else "", "--ports" if job.ports else ""]
        if wrong := " ".join(filter(None, beside)):
            raise UserError(
                f"{wrong} with {asked}: each task is a device of the slice, which ends as a whole, "
                f"and all meet at port {PORT}",
                f"Leave {wrong} out.",
            )
        tasks = tpu.hosts * tpu.tasks * self.slices
        if job.workers not in (None, tasks):
            of = f" of {self.slices} slices" if self.slices > 1 else ""
            raise UserError(
                f"--workers {job.workers} with {asked}{of}: that is {tasks} devices, and each is a "
                "worker",
                f"Leave --workers out, or say {tasks}.",
            )
        return tasks

    def _check_values(self, roles: Roles) -> None:
        """Raise `UserError` for a value that Kubernetes forbids."""
        check_image(self.image)
        quantity("--cpus", self.cpus)
        quantity("--storage", self.storage)
        check_memory(self.memory)
        if self.namespace is not None:
            check_label("--namespace", self.namespace)
        if self.queue is not None:
            check_label("--queue", self.queue)
        for flag, text in {
            "--storage-class": self.storage_class,
            "--pull-secret": self.pull_secret,
        }.items():
            if text is not None:
                check_name(flag, text)


def _start(tpu: TpuSlice | None) -> tuple[str, ...]:
    """What starts the program in a pod: on a TPU a process for each device."""
    return (
        ("python",) if tpu is None else ("spartito", "run", "--no-config", f"--workers={tpu.tasks}")
    )


def _check_names(job: Pods) -> None:
    """Raise `UserError` where the job's name makes no names for its pods and their service."""
    jobs = job.asked.slices - 1
    longest = max(len(f"{role}-{jobs}-{count}") for role, count in job.counts.items()) + SUFFIX + 1
    check_label("--name", job.name, SERVICE, LONGEST - longest)


def _script(path: Path) -> tuple[str, str]:
    """The name and the text of a script, for a ConfigMap."""
    if path.is_dir():
        raise UserError(
            f"{path} is a folder", "Build an image that has it, and start a script of one file."
        )
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if len(text.encode()) >= MOST_SCRIPT:
        raise UserError(
            f"{path} has {len(text.encode())} bytes, and a ConfigMap takes less than {MOST_SCRIPT}",
            "Build an image that has it.",
        )
    if not re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", path.name):
        raise UserError(
            f"{path.name!r} cannot be a key of a ConfigMap",
            "Use letters, digits, -, _ and . in the name of the script.",
        )
    return path.name, text


def _claim(flag: str, text: str) -> str:
    if "/" in text:
        raise UserError(
            f"{flag} {text} is no claim, and pods see no folder of this machine",
            f"Name a PersistentVolumeClaim of the cluster: {flag} pictures"
            + (", or what is at http:// or https://." if flag == "--data" else "."),
        )
    check_name(f"{flag} (a claim)", text)
    return text


def _data(text: str | None) -> tuple[str | None, str | None, str | None]:
    """The claim, or the URL of what is fetched, and what tasks are told: a path, or a store."""
    if text is None:
        return None, None, None
    if not is_remote(text):
        return _claim("--data", str(Path(text))), None, "/data"
    scheme, _, rest = text.partition("://")
    if scheme not in SCHEMES or not rest:
        raise UserError(
            f"--data {text} cannot be fetched",
            "Name a claim, or an archive or a file at http:// or https://.",
        )
    return None, text, path_of(text)
