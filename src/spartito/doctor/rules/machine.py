"""What is wrong with the machines: versions, clocks, memory, threads, disks, GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from spartito.cluster.spec import EVALUATOR
from spartito.collectives.membership.versions import Versions
from spartito.doctor.findings import Facts, Findings
from spartito.doctor.rules.verdict import Severity, Verdict, Verdicts
from spartito.doctor.wording import amount, joined
from spartito.launch.containers.plan import LEAST_MEMORY
from spartito.names import duration, who_has

SAME = "Install the same on all."
CLOCK_SECONDS = 1.0
"""Clocks may differ by so much."""

LEAST_SHM = 128 << 20
LEAST_DISK = 1 << 30
"""Free bytes below which a job is likely to fail."""

LITTLE_MEMORY = 512 << 20
"""Free bytes that a small model still fits into; under `LEAST_MEMORY` not even torch does."""


def versions(findings: Findings) -> Verdicts:
    """Spartito, torch or Python that differ, or are not there."""
    installed = {task: facts.versions for task, facts in findings.facts.items()}
    for package in sorted({name for versions in installed.values() for name in versions}):
        have = who_has({task: found.get(package, "?") for task, found in installed.items()})
        if len(have) > 1:
            alike = package == "torch" and len({Versions("", v).torch_series for v in have}) == 1
            severity: Severity = "warning" if alike else "error"
            what = f"the tasks have different versions of {package}: {_listed(have)}"
            yield Verdict("version", severity, what, SAME, list(findings.facts))
        elif "not installed" in have:
            yield Verdict("version", "error", f"{package} is not installed", "Install it.")
    pythons = _by(findings, lambda facts: facts.python)
    if len({python.rpartition(".")[0] for python in pythons}) > 1:
        what = f"the tasks have different versions of Python: {_listed(pythons)}"
        yield Verdict("version", "warning", what, SAME)


def sources(findings: Findings) -> Verdicts:
    """What described the cluster to the tasks, if there is more to say about it."""
    for remark, tasks in _by(findings, lambda facts: "; ".join(facts.remarks)).items():
        if remark:
            yield Verdict("source", "note", f"{joined(tasks)}: {remark}", tasks=tasks)
    described = _by(findings, lambda facts: facts.source)
    if len(described) > 1:
        what = f"the tasks read the cluster from different sources: {_listed(described)}"
        advice = "Start all tasks in the same way."
        yield Verdict("source", "warning", what, advice)


def clocks(findings: Findings) -> Verdicts:
    """Clocks that are off against the coordinator's."""
    for task in findings.facts:
        ahead = findings.clock(task)
        if ahead is not None and abs(ahead) > CLOCK_SECONDS:
            side = "ahead of" if ahead > 0 else "behind"
            what = (
                f"the clock of {task} is {duration(abs(ahead))} {side} that of "
                f"{findings.coordinator}"
            )
            advice = "Let both machines set their clocks by NTP."
            yield Verdict("clock", "warning", what, advice, [task])


def shared_memory(findings: Findings) -> Verdicts:
    """A /dev/shm that is too small for the tasks that exchange gradients in it."""
    for tasks in _by(findings, lambda facts: facts.ipc).values():
        for task in tasks:
            shm = findings.facts[task].shm
            if len(tasks) > 1 and shm is not None and shm.free < LEAST_SHM:
                what = (
                    f"{shm.path} of {task} has {amount(shm.free)} free of {amount(shm.size)}: "
                    f"{joined(tasks)} exchange gradients there"
                )
                advice = (
                    "Start the container with --shm-size 1g (shm_size in a compose file), or "
                    "free some."
                )
                yield Verdict("shared memory", "error", what, advice, [task])


def threads(findings: Findings) -> Verdicts:
    """More threads than cores among the tasks that compute on the same cores."""
    idle = {"ps", EVALUATOR, *(["chief"] if "ps 0" in findings.addresses else [])}
    for together in _by(findings, lambda facts: facts.cpus).values():
        tasks = [task for task in together if task.split()[0] not in idle]
        facts = [findings.facts[task] for task in tasks]
        counts = [_threads(each) for each in facts]
        cores = facts[0].cores if facts else 0
        # One thread each is the least there is; more tasks than cores is what was asked for.
        if sum(counts) <= cores or all(count == 1 for count in counts):
            continue
        unset = [each.task for each in facts if each.omp_num_threads is None]
        why = f"OMP_NUM_THREADS is not set for {joined(unset)}" if unset else "by OMP_NUM_THREADS"
        what = f"{joined(tasks)} want {sum(counts)} threads on {cores} cores ({why})"
        advice = (
            f"Set OMP_NUM_THREADS={max(1, cores // len(tasks))}; 'spartito run' does where it "
            "starts the tasks."
        )
        yield Verdict("threads", "warning", what, advice, tasks)


def memory(findings: Findings) -> Verdicts:
    """Memory that is nearly full."""
    for task, facts in findings.facts.items():
        free, limit = facts.memory.available, facts.memory.limit
        if facts.memory.total > 0 and free < LITTLE_MEMORY:
            bound = f" of the {amount(limit)} of its container" if limit is not None else ""
            what = (
                f"{task} has {amount(free)} of memory left{bound}; Python and torch alone take "
                f"{amount(LEAST_MEMORY)}"
            )
            advice = "End other programs there, or raise the container's limit."
            severity: Severity = "error" if free < LEAST_MEMORY else "warning"
            yield Verdict("memory", severity, what, advice, [task])


def disks(findings: Findings) -> Verdicts:
    """Disks that are nearly full."""
    for task, facts in findings.facts.items():
        for disk in facts.disks:
            if disk.free < LEAST_DISK:
                what = f"the disk of {disk.path} on {task} has {amount(disk.free)} free"
                advice = "Checkpoints may not fit: free some space."
                yield Verdict("disk", "warning", what, advice, [task])


def gpus(findings: Findings) -> Verdicts:
    """GPUs that differ; and what we do not look at."""
    trains = {
        task: facts.gpus
        for task, facts in findings.facts.items()
        if task.split()[0] in {"chief", "worker"}
    }
    have = who_has({task: f"{len(cards)} GPUs" for task, cards in trains.items()})
    if len(have) > 1:
        what = f"the tasks see different GPUs: {_listed(have)}"
        advice = "Where they are missing, look at the driver, and at CUDA_VISIBLE_DEVICES."
        yield Verdict("GPUs", "warning", what, advice)
    for backend in sorted({findings.facts[task].backend for task, had in trains.items() if had}):
        what = f"{backend} between the GPUs is not checked"
        none = "torch has no process group for these devices: tensors go through the host's memory"
        yield Verdict(backend or "devices", "note", what if backend else none)


def _by(findings: Findings, key: Callable[[Facts], str]) -> dict[str, list[str]]:
    """The tasks that came, grouped."""
    return who_has({task: key(facts) for task, facts in findings.facts.items()})


def _listed(have: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{value} on {joined(tasks)}" for value, tasks in have.items())


def _threads(facts: Facts) -> int:
    """The threads that torch will start there."""
    first = (facts.omp_num_threads or "").partition(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else facts.cores
