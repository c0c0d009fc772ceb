"""The file of a job in Kubernetes, as one would write it by hand; pure, from a job to its text."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from textwrap import wrap

from spartito.launch.kubernetes.objects import INSTANCE, Object, claim, objects
from spartito.launch.kubernetes.plan import STORE, Pods
from spartito.launch.kubernetes.values import quantity
from spartito.launch.written import dump

WIDTH = 98
"""Of a comment."""

KIND = {"job": "an Indexed Job", "jobset": "a JobSet", "trainjob": "a TrainJob"}
NAMES = {"ps": "parameter server", STORE: "store"}

ABOUT = {
    "NetworkPolicy": "The pods of the job reach each other, and names; nobody else reaches them. "
    "What a script fetches wants a rule of its own.",
    "ConfigMap": "The script, as it was when this was written.",
    "PersistentVolumeClaim": "The run folders: model, report, backups. 'kubectl delete' as above "
    "leaves it there.",
    "Service": "Names for the pods, before they are ready too: they wait for each other.",
    "TrainingRuntime": "What Kubeflow's trainer makes of the TrainJob below: a JobSet.",
    "TrainJob": "The job itself. TF_CONFIG lists its pods: their number is changed by writing "
    "this anew.",
}
"""What stands above an object of a kind."""

ABOUT_LINES = {
    "backoffLimitPerIndex:": "So often is each task started again after a failure that counts.",
    "maxFailedIndexes:": "One that is lost for good ends the job: the others cannot do without it.",
    "podReplacementPolicy:": "Not before the lost pod has ended: two would be one task.",
    "shareProcessNamespace:": "The first process of the pod is not the task, which so gets its "
    "signals, but one that reaps.",
    "terminationGracePeriodSeconds:": "From SIGTERM to SIGKILL: for a last backup.",
    "- name: TASK_INDEX": "Who is in the job, and who this is.",
    "readinessProbe:": "Ready is a task that reaches the others. No liveness probe: to wait is no "
    "fault, and every wait has a limit.",
    "requests: {cpu": "Requests are limits: such pods are evicted last.",
    "successPolicy:": "The store does not end by itself.",
    "failurePolicy:": "The Jobs below start their pods again; one that gives up ends all.",
    "initContainers:": "Fetches the data before the task starts.",
}
"""What stands above a line, where it comes first in an object."""


def job_file(job: Pods) -> str:
    """The file that ``kubectl apply`` takes."""
    parts = ["\n".join([*_heading(job), ""])]
    for one in objects(job):
        above = _comment(ABOUT[one["kind"]]) if one["kind"] in ABOUT else []
        parts.append("\n".join([*above, *_commented(job, one), ""]))
    return "---\n".join(parts)


def needs(job: Pods) -> str:
    """What the pods of the job take together."""
    counts = job.counts
    pods = sum(counts.values())
    cpus, memory = quantity("--cpus", job.cpus) * pods, quantity("--memory", job.memory) * pods
    gpus = f", {counts['worker']} GPUs" if job.gpus and counts.get("worker") else ""
    return f"{_plural(pods, 'pod')}, {_number(cpus)} CPUs, {_number(memory / 2**30)}Gi{gpus}"


def _heading(job: Pods) -> Iterator[str]:
    who = ", ".join(_plural(n, NAMES.get(role, role)) for role, n in job.counts.items())
    jobs = f"{len(job.counts)} Indexed Jobs" if not job.is_one_object else KIND[job.kind]
    chosen = f"-l {INSTANCE}={job.name}"
    space = f" -n {job.namespace}" if job.namespace is not None else ""
    ended = {"job": "job,service", "jobset": "jobset", "trainjob": "trainjob,trainingruntime"}
    others = "networkpolicy" + (",configmap" if job.script is not None else "")
    yield f"# {job.about} under {job.strategy}: {who}, in {jobs}."
    if job.insecure:
        yield "# Insecure: what tasks send is not encrypted (--insecure)."
    yield "#"
    if job.meets:
        yield "# By a secret the tasks know each other, and encrypt what they send. Make it once:"
        made = f"kubectl{space} create secret generic {job.name} --from-file=secret=/dev/stdin"
        yield f"#   openssl rand -hex 32 | {made}"
        yield "#"
    yield f"#   kubectl{space} apply -f job.yaml"
    yield f"#   kubectl{space} get pods {chosen}"
    yield f"#   kubectl{space} logs {chosen} --prefix -f --max-log-requests 99"
    yield f"#   kubectl{space} delete {ended[job.kind]},{others} {chosen}"
    yield "#"
    yield from _comment(
        f"Model and report: the folder {job.name} in the claim {claim(job)}, which stays. A recipe "
        "that finds a backup there goes on from it: take another --name to begin anew."
    )
    asks = f"the queue {job.queue}" if job.queue is not None else "the cluster"
    yield f"# Together: {needs(job)}. Whether {asks} has so much was not asked."


def _commented(job: Pods, one: Object) -> Iterator[str]:
    """The lines of an object, those that want it with a comment above."""
    left = dict(ABOUT_LINES)
    left["podFailurePolicy:"] = _codes(job)
    for line in dump(one).splitlines():
        key = next((key for key in left if line.lstrip().startswith(key)), None)
        if key is not None:
            yield from _comment(left.pop(key), " " * (len(line) - len(line.lstrip())))
        yield line


def _comment(text: str, indent: str = "") -> list[str]:
    """The lines of a comment."""
    return [f"{indent}# {line}" for line in wrap(text, WIDTH - len(indent))]


def _codes(job: Pods) -> str:
    also = "69 (another task was lost), " if job.is_one_object else ""
    return (
        f"2 is a mistake of the user's: no second try. {also}75 (told to end, all is saved) and "
        "pods that the cluster takes away start again, and do not count."
    )


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"


def _number(value: Decimal) -> str:
    return f"{value.quantize(Decimal('0.01')).normalize():f}"
