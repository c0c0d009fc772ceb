"""The objects of a job in Kubernetes, as plain values; pure, from a job to its objects."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from spartito.cluster import tpu
from spartito.cluster.tf_config import VARIABLE
from spartito.errors import EXIT_PREEMPTED, EXIT_USER
from spartito.launch.kubernetes.plan import INDEX, STORE, Pods
from spartito.launch.kubernetes.tpus import EXCLUSIVE, RESOURCE, TpuSlice
from spartito.launch.kubernetes.values import quantity
from spartito.launch.processes.local import RUNTIME
from spartito.launch.yaml_text import Block, List, Mode, Row
from spartito.names import (
    ENV_RECOVERY,
    ENV_RESUME,
    ENV_RUN_DIR,
    ENV_SECRET_FILE,
    ENV_SNAPSHOT_DIR,
    ENV_STORE,
)
from spartito.wire.addresses import address

Object = dict[str, Any]

USER = 1000
"""Who runs in the pods: never root. The image's user, and any other works too."""

GRACE_SECONDS = 60
"""From SIGTERM to SIGKILL: a task may write a last backup."""

KEPT_SECONDS = 86_400
"""How long an ended job is listed, with the output of its pods."""

INSTANCE = "app.kubernetes.io/instance"
NUMBER = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
SLICE = "metadata.annotations['jobset.sigs.k8s.io/job-index']"
SECRET = "/etc/spartito"
GPU = "nvidia.com/gpu"
FETCH = "data"
"""The container that fetches the data before a task starts."""
QUEUE = "kueue.x-k8s.io/queue-name"
TRAINER = "trainer.kubeflow.org/v1alpha1"


def objects(job: Pods) -> list[Object]:
    """All objects of the job, in the order in which they are made."""
    found = [_network_policy(job)]
    if job.script is not None:
        name, text = job.script
        found.append(
            _object(job, "v1", "ConfigMap", f"{job.name}-script", data={name: Block(text)})
        )
    if job.out is None:
        found.append(_claim(job))
    if job.asked.kind == "job":
        found += [] if job.alone else [_service(job)]
        return [*found, *(_job(job, role) for role in job.counts)]
    if job.asked.kind == "jobset":
        return [*found, _object(job, "jobset.x-k8s.io/v1alpha2", "JobSet", spec=_set(job))]
    runtime = {"mlPolicy": {"numNodes": job.roles.workers}, "template": {"spec": _set(job)}}
    named = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    return [
        *found,
        _object(job, TRAINER, "TrainingRuntime", spec=runtime, queued=False),
        _object(job, TRAINER, "TrainJob", spec={"runtimeRef": named}),
    ]


def _object(
    job: Pods,
    version: str,
    kind: str,
    name: str | None = None,
    queued: bool | None = None,
    **rest: Any,
) -> Object:
    """An object with its metadata; what Kueue admits has its queue."""
    metadata: Object = {"name": name or job.name}
    if job.asked.namespace is not None:
        metadata["namespace"] = job.asked.namespace
    metadata["labels"] = _labels(job)
    if queued is None:
        queued = kind in ("Job", "JobSet", "TrainJob")
    if queued and job.asked.queue is not None:
        metadata["labels"][QUEUE] = job.asked.queue
    if kind == "JobSet" and job.tpu is not None:
        metadata["annotations"] = dict(EXCLUSIVE)
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def _labels(job: Pods, role: str | None = None) -> Object:
    own = {} if role is None else {"app.kubernetes.io/component": role}
    return {"app.kubernetes.io/name": "spartito", INSTANCE: job.name, **own}


def _network_policy(job: Pods) -> Object:
    def own() -> Object:
        return {"podSelector": {"matchLabels": Row({INSTANCE: job.name})}}

    names = [Row(protocol=way, port=53) for way in ("UDP", "TCP")]
    egress: list[Object] = [] if job.alone else [{"to": [own()]}]
    egress.append({"ports": names})
    if job.url is not None:
        egress.append({"ports": [Row(protocol="TCP", port=one) for one in job.data_ports]})
    spec = {
        **own(),
        "policyTypes": List(["Ingress", "Egress"]),
        "ingress": List() if job.alone else [{"from": [own()]}],
        "egress": egress,
    }
    return _object(job, "networking.k8s.io/v1", "NetworkPolicy", spec=spec)


def _claim(job: Pods) -> Object:
    several = sum(job.counts.values()) > 1
    spec: Object = {"accessModes": List(["ReadWriteMany" if several else "ReadWriteOnce"])}
    if job.asked.storage_class is not None:
        spec["storageClassName"] = job.asked.storage_class
    spec["resources"] = {"requests": Row(storage=job.asked.storage)}
    return _object(job, "v1", "PersistentVolumeClaim", claim(job), spec=spec)


def claim(job: Pods) -> str:
    """The claim of the run folders."""
    return job.out or f"{job.name}-runs"


def _service(job: Pods) -> Object:
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": Row({INSTANCE: job.name}),
        "ports": [Row(name="tasks", port=job.port)],
    }
    return _object(job, "v1", "Service", spec=spec)


def _job(job: Pods, role: str) -> Object:
    spec = {"ttlSecondsAfterFinished": KEPT_SECONDS, **_job_spec(job, role)}
    made = _object(job, "batch/v1", "Job", f"{job.name}-{role}", spec=spec)
    made["metadata"]["labels"]["app.kubernetes.io/component"] = role
    return made


def _set(job: Pods) -> Object:
    """The spec of a JobSet: the roles as replicated jobs."""
    work = [role for role in job.counts if role not in ("ps", STORE)]
    spec: Object = {}
    if job.asked.kind == "jobset":
        spec["ttlSecondsAfterFinished"] = KEPT_SECONDS
    if not job.alone:
        spec["network"] = Row(
            enableDNSHostnames=True, subdomain=job.name, publishNotReadyAddresses=True
        )
    if len(work) < len(job.counts):
        spec["successPolicy"] = {"operator": "All", "targetReplicatedJobs": List(work)}
    spec["failurePolicy"] = Row(maxRestarts=0)
    spec["replicatedJobs"] = [_replicated(job, role) for role in job.counts]
    return spec


def _replicated(job: Pods, role: str) -> Object:
    template: Object = {"spec": _job_spec(job, role)}
    if job.asked.kind == "trainjob" and role == "worker":
        step = Row({"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"})
        template = {"metadata": {"labels": step}, **template}
    return {"name": role, "replicas": job.asked.slices, "template": template}


def _job_spec(job: Pods, role: str) -> Object:
    count = job.pods_of_each[role]
    spec: Object = {"completionMode": "Indexed", "completions": count, "parallelism": count}
    if role == STORE:  # its container is started again where it is: so it keeps its journal
        return spec | {"template": _template(job, role)}
    spec["backoffLimitPerIndex"] = job.asked.restarts_of_each
    if count > 1 and (role == "ps" or not job.roles.ps):
        spec["maxFailedIndexes"] = 0
    spec["podReplacementPolicy"] = "Failed"
    spec["podFailurePolicy"] = {"rules": _rules(job)}
    return spec | {"template": _template(job, role)}


def _rules(job: Pods) -> list[Object]:
    def code(container: str, value: int) -> Object:
        return Row(containerName=container, operator="In", values=List([value]))

    containers = [job.container, *([FETCH] if job.url is not None else [])]
    return [
        *({"action": "FailJob", "onExitCodes": code(one, EXIT_USER)} for one in containers),
        {"action": "Ignore", "onExitCodes": code(job.container, EXIT_PREEMPTED)},
        {"action": "Ignore", "onPodConditions": [Row(type="DisruptionTarget", status="True")]},
    ]


def _template(job: Pods, role: str) -> Object:
    spec: Object = {
        "restartPolicy": "OnFailure" if role == STORE else "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "shareProcessNamespace": True,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
    }
    if job.asked.kind == "job" and not job.alone:
        spec = {"subdomain": job.name, **spec}
    if job.asked.gpus and role == "worker":
        spec["tolerations"] = [Row(key=GPU, operator="Exists", effect="NoSchedule")]
    if job.tpu is not None:
        spec["nodeSelector"] = job.tpu.selector
        spec["tolerations"] = [Row(key=RESOURCE, operator="Exists", effect="NoSchedule")]
    if job.asked.pull_secret is not None:
        spec["imagePullSecrets"] = [Row(name=job.asked.pull_secret)]
    spec["securityContext"] = {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": Row(type="RuntimeDefault"),
    }
    if job.url is not None and role != STORE:
        spec["initContainers"] = [_fetch(job, job.url)]
    spec["containers"] = [_container(job, role)]
    spec["volumes"] = _volumes(job, role)
    return {"metadata": {"labels": _labels(job, role)}, "spec": spec}


def _rights() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": Row(drop=List(["ALL"])),
    }


def _resources(job: Pods, role: str) -> Object:
    """Requests are limits; GPUs and TPUs are for workers."""
    same: Object = dict(zip(("cpu", "memory"), job.size(role), strict=True))
    if job.asked.gpus and role == "worker":
        same[GPU] = "1"
    if job.tpu is not None and role == "worker":
        same[RESOURCE] = str(job.tpu.chips)
    return {"requests": Row(same), "limits": Row(same)}


def _fetch(job: Pods, url: str) -> Object:
    words = ["python", "-m", "spartito.launch.fetch", _plain(url), "/data"]
    mounts = [("data", "/data", False), ("tmp", "/tmp", False)]
    return {
        "name": FETCH,
        "image": job.asked.image,
        "imagePullPolicy": "IfNotPresent",
        "command": List(words),
        "resources": _resources(job, FETCH),
        "securityContext": _rights(),
        "volumeMounts": [_mount(*mount) for mount in mounts],
    }


def _container(job: Pods, role: str) -> Object:
    store = ("python", "-m", "spartito.cluster.store", job.address(STORE, 0), "/snapshots/journal")
    words = store if role == STORE else job.command
    found: Object = {
        "name": STORE if role == STORE else job.container,
        "image": job.asked.image,
        "imagePullPolicy": "IfNotPresent",
        "command": List(map(_plain, words)),
        **({} if role == STORE else {"workingDir": "/runs"}),
        "env": _environment(job, role),
    }
    if job.meets:
        found["ports"] = [Row(name="task", containerPort=job.port)]
        found["readinessProbe"] = _probe(job, role)
    found["resources"] = _resources(job, role)
    found["securityContext"] = _rights()
    found["volumeMounts"] = [_mount(name, path, read) for name, path, read in _mounts(job, role)]
    return found


def _probe(job: Pods, role: str) -> Object:
    """Ready is a task that reaches the rendezvous of the job; a server, which listens."""
    host, port = job.rendezvous
    where = "socket.gethostname()" if role in ("ps", STORE) else json.dumps(host)
    look = f"import socket; socket.create_connection(({where}, {port}), 3)"
    return {
        "exec": {"command": List(["python", "-c", look])},
        "periodSeconds": 30,
        "timeoutSeconds": 5,
    }


def _environment(job: Pods, role: str) -> list[Object]:
    told = dict(job.tls)
    if job.meets:
        told[ENV_SECRET_FILE] = f"{SECRET}/secret"
    if role == STORE:
        return [_variable(name, value) for name, value in told.items()]
    run = f"/runs/{job.name}"
    shared = {**job.said, ENV_RUN_DIR: run, ENV_RESUME: "1"}
    if job.roles.ps:
        shared[ENV_SNAPSHOT_DIR] = f"{run}/snapshots"
    if job.recovery is not None:
        shared |= {ENV_RECOVERY: job.recovery.text, ENV_STORE: address(*job.rendezvous)}
    threads = math.ceil(quantity("--cpus", job.asked.cpus)) if role in ("chief", "worker") else 1
    # What starts several processes in a pod divides its cores among them.
    cores = {"OMP_NUM_THREADS": str(threads)} if job.tpu is None else {}
    shared |= {**told, **cores, **RUNTIME}
    if role == "ps":
        shared["CUDA_VISIBLE_DEVICES"] = ""
    variables = [_variable(name, _plain(value)) for name, value in shared.items()]
    if job.tpu is not None:
        return [*_of_tpu(job, job.tpu), *variables]
    if job.alone:
        return variables
    return [
        {"name": INDEX, "valueFrom": {"fieldRef": Row(fieldPath=NUMBER)}},
        {"name": VARIABLE, "value": job.tf_config(role)},
        *variables,
    ]


def _of_tpu(job: Pods, asked: TpuSlice) -> list[Object]:
    """Who is in the slice and who this is, by the names that Google's programs read.

    GKE says the same to such pods. No metadata server is asked: the pod's network hides it.
    """
    skips = _variable(tpu.SKIP_METADATA, "true")
    if job.alone:
        return [skips]
    number = "$(" + tpu.SLICE + ")"
    hosts = [
        job.host("worker", index) if job.asked.slices == 1 else job.host_of(number, "worker", index)
        for index in range(asked.hosts)
    ]
    several = [
        {"name": tpu.SLICE, "valueFrom": {"fieldRef": Row(fieldPath=SLICE)}},
        _variable(tpu.SLICES, str(job.asked.slices)),
        _variable(tpu.COORDINATOR, job.host("worker", 0)),
    ]
    return [
        {"name": tpu.WORKER, "valueFrom": {"fieldRef": Row(fieldPath=NUMBER)}},
        *(several if job.asked.slices > 1 else []),
        _variable(tpu.HOSTNAMES, ",".join(hosts)),
        _variable(tpu.TOPOLOGY, asked.topology),
        skips,
    ]


def _variable(name: str, value: str) -> Object:
    return Row(name=name, value=value)


def _plain(text: str) -> str:
    """``text`` where ``$(NAME)`` would be read as a variable, and ``$$`` as one ``$``."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _mounts(job: Pods, role: str) -> list[tuple[str, str, bool]]:
    """The volumes of a container: name, path, whether it only reads."""
    found = [("tmp", "/tmp", False)]
    if job.meets:
        found.append(("secret", SECRET, True))
    if role == STORE:
        return [*found, ("journal", "/snapshots", False)]
    found += [("shm", "/dev/shm", False), ("runs", "/runs", False)]
    if job.script is not None:
        found.append(("script", "/scripts", True))
    if job.data is not None or job.url is not None:
        found.append(("data", "/data", True))
    return found


def _mount(name: str, path: str, read: bool) -> Object:
    return Row(name=name, mountPath=path, **({"readOnly": True} if read else {}))


def _volumes(job: Pods, role: str) -> list[Object]:
    kinds: Object = {
        "tmp": {"emptyDir": Row(sizeLimit="1Gi")},
        "shm": {"emptyDir": Row(medium="Memory", sizeLimit="1Gi")},
        "secret": {"secret": Row(secretName=job.name, defaultMode=Mode(0o440))},
        "journal": {"emptyDir": Row(sizeLimit="1Gi")},
        "runs": {"persistentVolumeClaim": Row(claimName=claim(job))},
        "script": {"configMap": Row(name=f"{job.name}-script")},
        "data": {"emptyDir": Row(sizeLimit=job.asked.storage)},
    }
    if job.data is not None:
        kinds["data"] = {"persistentVolumeClaim": Row(claimName=job.data, readOnly=True)}
    return [{"name": name, **kinds[name]} for name, _, _ in _mounts(job, role)]
