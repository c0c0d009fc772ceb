"""What is wrong with the machines: versions, clocks, memory, threads, disks, GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from spartito.cluster.spec import EVALUATOR
from spartito.collectives.versions import Versions
from spartito.doctor.findings import Report
from spartito.doctor.rules.verdict import Verdict
from spartito.doctor.transport.messages import Facts
from spartito.doctor.words import amount, duration, joined
from spartito.launch.containers.plan import LEAST_MEMORY

CLOCK_SECONDS = 1.0
"""Clocks may differ by so much."""

LEAST_SHM = 128 << 20
LEAST_DISK = 1 << 30
"""Free bytes below which a job is likely to fail."""

LITTLE_MEMORY = 512 << 20
"""Free bytes that a small model still fits into; under `LEAST_MEMORY` not even torch does."""


def versions(report: Report) -> Iterator[Verdict]:
    """Spartito, torch or Python that differ, or are not there."""
    packages = sorted({name for facts in report.facts.values() for name in facts.versions})
    for package in packages:
        have = _grouped({t: facts.versions.get(package, "?") for t, facts in report.facts.items()})
        if len(have) > 1:
            alike = package == "torch" and len({Versions("", v).torch_series for v in have}) == 1
            yield Verdict(
                "version",
                "warning" if alike else "wrong",
                f"the tasks have different versions of {package}: {_listed(have)}",
                "Install the same on all.",
                [task for tasks in have.values() for task in tasks],
            )
        elif "not installed" in have:
            yield Verdict("version", "wrong", f"{package} is not installed", "Install it.")
    pythons = _by(report, lambda facts: facts.python)
    if len({python.rpartition(".")[0] for python in pythons}) > 1:
        yield Verdict(
            "version",
            "warning",
            f"the tasks have different versions of Python: {_listed(pythons)}",
            "Install the same on all.",
        )


def sources(report: Report) -> Iterator[Verdict]:
    """Where the tasks read who they are, if there is more to say about it."""
    for remark, tasks in _grouped(
        {task: "; ".join(facts.remarks) for task, facts in report.facts.items()}
    ).items():
        if remark:
            yield Verdict("source", "note", f"{joined(tasks)}: {remark}", tasks=tasks)
    told = _by(report, lambda facts: facts.source)
    if len(told) > 1:
        yield Verdict(
            "source",
            "warning",
            f"the tasks read who they are from different sources: {_listed(told)}",
            "Start all tasks in the same way.",
        )


def clocks(report: Report) -> Iterator[Verdict]:
    """Clocks that are off against the leader's."""
    for task in report.facts:
        ahead = report.clock(task)
        if ahead is not None and abs(ahead) > CLOCK_SECONDS:
            side = "ahead of" if ahead > 0 else "behind"
            yield Verdict(
                "clock",
                "warning",
                f"the clock of {task} is {duration(abs(ahead))} {side} that of {report.leader}",
                "Let both machines set their clocks by NTP.",
                [task],
            )


def shared_memory(report: Report) -> Iterator[Verdict]:
    """A /dev/shm that is too small for the tasks that meet in it."""
    for tasks in _by(report, lambda facts: facts.ipc).values():
        for task in tasks:
            shm = report.facts[task].shm
            if len(tasks) > 1 and shm is not None and shm.free < LEAST_SHM:
                yield Verdict(
                    "shared memory",
                    "wrong",
                    f"{shm.path} of {task} has {amount(shm.free)} free of {amount(shm.size)}: "
                    f"{joined(tasks)} exchange gradients there",
                    "Start the container with --shm-size 1g (shm_size in a compose file), or "
                    "free some.",
                    [task],
                )


def threads(report: Report) -> Iterator[Verdict]:
    """More threads than cores among the tasks that compute and share cores."""
    idle = {"ps", EVALUATOR, *(["chief"] if "ps 0" in report.addresses else [])}
    for together in _by(report, lambda facts: facts.shares).values():
        tasks = [task for task in together if task.split()[0] not in idle]
        facts = [report.facts[task] for task in tasks]
        if not facts:
            continue
        wanted = sum(_threads(each) for each in facts)
        cores = facts[0].cores
        # One thread each is the least there is; more tasks than cores is what was asked for.
        if wanted <= cores or all(_threads(each) == 1 for each in facts):
            continue
        unset = [each.task for each in facts if each.omp is None]
        why = f"OMP_NUM_THREADS is not set for {joined(unset)}" if unset else "by OMP_NUM_THREADS"
        yield Verdict(
            "threads",
            "warning",
            f"{joined(tasks)} want {wanted} threads on {cores} cores ({why})",
            f"Set OMP_NUM_THREADS={max(1, cores // len(tasks))}; 'spartito run' does where it "
            "starts the tasks.",
            tasks,
        )


def space(report: Report) -> Iterator[Verdict]:
    """Memory and disks that are nearly full."""
    for task, facts in report.facts.items():
        if facts.memory.total > 0 and facts.memory.available < LITTLE_MEMORY:
            too_little = facts.memory.available < LEAST_MEMORY
            limit = facts.memory.limit
            bound = f", its container may have {amount(limit)}" if limit is not None else ""
            yield Verdict(
                "memory",
                "wrong" if too_little else "warning",
                f"{task} has {amount(facts.memory.available)} of memory left{bound}; Python and "
                f"torch alone take {amount(LEAST_MEMORY)}",
                "End other programs there, or raise the container's limit.",
                [task],
            )
        for disk in facts.disks:
            if disk.free < LEAST_DISK:
                yield Verdict(
                    "disk",
                    "warning",
                    f"the disk of {disk.path} on {task} has {amount(disk.free)} free",
                    "Checkpoints may not fit: free some.",
                    [task],
                )


def gpus(report: Report) -> Iterator[Verdict]:
    """GPUs that differ; and what we do not look at."""
    trains = {
        task: facts.gpus
        for task, facts in report.facts.items()
        if task.split()[0] in {"chief", "worker"}
    }
    have = _grouped({task: f"{len(cards)} GPUs" for task, cards in trains.items()})
    if len(have) > 1:
        yield Verdict(
            "GPUs",
            "warning",
            f"the tasks see different GPUs: {_listed(have)}",
            "Look at CUDA_VISIBLE_DEVICES and the driver where they are missing.",
        )
    if any(trains.values()):
        yield Verdict("NCCL", "note", "NCCL between the GPUs is not checked")


def _by(report: Report, key: Callable[[Facts], str]) -> dict[str, list[str]]:
    """The tasks that came, grouped."""
    return _grouped({task: key(facts) for task, facts in report.facts.items()})


def _grouped(values: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for task, value in values.items():
        found.setdefault(value, []).append(task)
    return found


def _listed(have: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{value} on {joined(tasks)}" for value, tasks in have.items())


def _threads(facts: Facts) -> int:
    """The threads that torch will start there."""
    first = (facts.omp or "").partition(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else facts.cores
