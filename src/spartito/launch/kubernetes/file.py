"""The file of a job in Kubernetes, as one would write it by hand; pure, from a job to its text."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

from spartito.launch.images import names_no_registry
from spartito.launch.kubernetes.objects import INSTANCE, claim, objects
from spartito.launch.kubernetes.plan import Pods
from spartito.launch.kubernetes.values import quantity
from spartito.launch.yaml_text import comment, commented
from spartito.names import plural

KIND = {"job": "an Indexed Job", "jobset": "a JobSet", "trainjob": "a TrainJob"}
ENDED = {"job": "job,service", "jobset": "jobset", "trainjob": "trainjob,trainingruntime"}
"""What 'kubectl delete' is told to end."""

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
    "ttlSecondsAfterFinished:": "For a day after its end it is listed, and its pods with what they "
    "printed.",
    "backoffLimitPerIndex:": "So often is each task started again after a failure that counts.",
    "maxFailedIndexes:": "One that is lost for good ends the job: the others cannot do without it.",
    "podReplacementPolicy:": "Not before the lost pod has ended: two would be one task.",
    "podFailurePolicy:": "2 is a mistake of the user's: no second try. 75 (told to end, all is "
    "saved) and pods that the cluster takes away start again, and do not count. All else does",
    "shareProcessNamespace:": "Process 1 is then the pod's own: it reaps what is left of others, "
    "and the task gets signals as it would anywhere.",
    "terminationGracePeriodSeconds:": "From SIGTERM to SIGKILL: for a last backup.",
    "tolerations:": "Nodes with GPUs are often kept free of what needs none.",
    "- name: TASK_INDEX": "Who is in the job, and who this is. JOB_COMPLETION_INDEX comes behind "
    "all variables, too late to be put into one.",
    "readinessProbe:": "Ready is a task that reaches the others. No liveness probe: to wait is no "
    "fault, and every wait has a limit.",
    "requests: {cpu": "Requests are limits: such pods are evicted last.",
    "failurePolicy:": "The Jobs below start their pods again; one that gives up ends all.",
    "initContainers:": "Fetches the data before the task starts.",
    "- {protocol: UDP": "Names.",
    "emptyDir: {medium": "For gradients; it counts as memory of the pod.",
}
"""What stands above a line, where it comes first in an object."""


def job_file(job: Pods) -> str:
    """The file that ``kubectl apply`` takes."""
    about, lines = ABOUT | _about(job), ABOUT_LINES | _about_lines(job)
    parts = ["\n".join([*_heading(job), ""])]
    for one in objects(job):
        above = comment(about[one["kind"]]) if one["kind"] in about else []
        # What a script says is not commented on.
        body = commented(one, {} if one["kind"] == "ConfigMap" else lines)
        parts.append("\n".join([*above, *body, ""]))
    return "---\n".join(parts)


def needs(job: Pods) -> str:
    """What the pods of the job take together."""
    pods = sum(job.counts.values())
    cpus = memory = Decimal(0)
    for role, count in job.counts.items():
        each = job.size(role)
        cpus += count * quantity("--cpus", each[0])
        memory += count * quantity("--memory", each[1])
    gpus = f", {job.roles.workers} GPUs" if job.asked.gpus else ""
    if job.tpu is not None:
        gpus = f", {job.roles.workers * job.tpu.chips} TPU chips"
    return f"{plural(pods, 'pod')}, {_number(cpus)} CPUs, {_number(memory / 2**30)}Gi{gpus}"


def image_of_nobody(job: Pods) -> str:
    """What is to be done about an image that names no registry; empty where it names one."""
    image = job.asked.image
    if not names_no_registry(image):
        return ""
    return (
        f"the image {image} names no registry: nodes that do not have it ask "
        f"docker.io/library. Load it into each (kind load docker-image {image}, minikube image "
        f"load {image}), or push it where they can pull it, and name that: --image "
        "registry.example/team/spartito:1.0"
    )


def _heading(job: Pods) -> Iterator[str]:
    several = job.asked.kind == "job" and len(job.counts) > 1
    jobs = f"{len(job.counts)} Indexed Jobs" if several else KIND[job.asked.kind]
    chosen = f"-l {INSTANCE}={job.name}"
    space = f" -n {job.asked.namespace}" if job.asked.namespace is not None else ""
    others = "networkpolicy" + (",configmap" if job.script is not None else "")
    yield from comment(f"{job.about} under {job.strategy}: {job.who}, in {jobs}.")
    if job.insecure:
        yield "# Insecure: what tasks send is not encrypted (--insecure)."
    if wrong := image_of_nobody(job):
        yield from comment(wrong[0].upper() + wrong[1:] + ".")
    yield "#"
    if job.meets:
        yield "# By a secret the tasks know each other, and encrypt what they send. Make it once:"
        made = f"kubectl{space} create secret generic {job.name} --from-file=secret=/dev/stdin"
        yield f"#   openssl rand -hex 32 | {made}"
        yield "#"
    yield f"#   kubectl{space} apply -f job.yaml"
    yield f"#   kubectl{space} get pods {chosen}"
    yield f"#   kubectl{space} logs {chosen} --prefix -f --max-log-requests 99"
    ended = ENDED[job.asked.kind].removesuffix(",service" if job.alone else "")
    yield f"#   kubectl{space} delete {ended},{others} {chosen}"
    yield "#"
    yield from comment(
        f"Model and report: the folder {job.name} in the claim {claim(job)}, which stays. A recipe "
        "that finds a backup there goes on from it: take another --name to begin anew."
    )
    asks = f"the queue {job.asked.queue}" if job.asked.queue is not None else "the cluster"
    yield f"# Together: {needs(job)}. Whether {asks} has so much was not asked."


def _about(job: Pods) -> dict[str, str]:
    """What is said of the kinds otherwise in this job."""
    told = {}
    if job.alone:
        told["NetworkPolicy"] = (
            "Nobody reaches the pod, and it asks for names alone. What a script fetches wants a "
            "rule of its own."
        )
        told["TrainJob"] = "The job itself."
    else:
        told["PersistentVolumeClaim"] = (
            f"{ABOUT['PersistentVolumeClaim']} Several pods write there: its class has to allow "
            "ReadWriteMany, as NFS and CephFS do, and disks do not."
        )
    return told


def _about_lines(job: Pods) -> dict[str, str]:
    """What is said above lines in this job alone."""
    found, told = dict[str, str](), list[str]()
    if job.tpu is not None:
        found["nodeSelector:"] = "GKE makes a node pool for each slice: it has these labels."
        found["tolerations:"] = "Nodes with TPUs are kept free of what needs none."
        found["- name: TPU_WORKER_ID"] = (
            "Who is in the job, and who this is, by the names that Google's programs read."
        )
    also = "." if job.alone else ", 69 (another task was lost, or never came) too."
    found["podFailurePolicy:"] = ABOUT_LINES["podFailurePolicy:"] + also
    if job.roles.ps:
        told.append("A server that comes back when the work is done has nobody to serve.")
    if job.recovery is not None:
        told.append("The store does not end by itself.")
    if told:
        found["successPolicy:"] = " ".join(told)
    if job.url is not None:
        found[f"- {{protocol: TCP, port: {job.data_ports[0]}}}"] = "The data."
    return found


def _number(value: Decimal) -> str:
    return f"{value.quantize(Decimal('0.01')).normalize():f}"
