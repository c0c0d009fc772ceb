"""A player of pods: a tool for tests, which starts the pods of a written file in containers.

It does what the control plane of Kubernetes and the kubelet would do with the objects that
``spartito cluster kubernetes`` writes: indices and host names, environment, volumes, init
containers, rights, exit codes, restarts, deletion and eviction with grace. It is no Kubernetes:
it schedules nothing, waits no backoff, asks probes when it is told to, and enforces no
NetworkPolicy.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.launch.containers import docker

Object = dict[str, Any]
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
SLICE = "metadata.annotations['jobset.sigs.k8s.io/job-index']"
PAUSE = 0.2
"""Seconds between two looks at the containers."""


@dataclass(frozen=True)
class Job:
    """An Indexed Job: one of the file, or what a JobSet makes of a replicated job."""

    name: str
    role: str
    subdomain: str
    spec: Object
    number: int = 0

    @property
    def pod(self) -> Object:
        found: Object = self.spec["template"]["spec"]
        return found

    @property
    def container(self) -> Object:
        (found,) = self.pod["containers"]
        return dict(found)

    @property
    def containers(self) -> list[str]:
        listed = [*self.pod.get("initContainers", ()), *self.pod["containers"]]
        return [one["name"] for one in listed]

    def host(self, index: int) -> str:
        return f"{self.name}-{index}"

    def environment(self, index: int) -> dict[str, str]:
        """The variables of a pod, in which those before them are put in."""
        known = {"JOB_COMPLETION_INDEX": str(index)}
        found: dict[str, str] = {}
        for one in self.container["env"]:
            if "valueFrom" in one:
                paths = {INDEX: index, SLICE: self.number}
                found[one["name"]] = str(paths[one["valueFrom"]["fieldRef"]["fieldPath"]])
            else:
                found[one["name"]] = expanded(one["value"], found)
        return known | found

    def command(self, index: int) -> list[str]:
        return [expanded(word, self.environment(index)) for word in self.container["command"]]

    def action(self, code: int | None, disrupted: bool) -> str:
        """What the Job does about a pod that failed: its first rule that matches."""
        for rule in self.spec.get("podFailurePolicy", {"rules": []})["rules"]:
            codes = rule.get("onExitCodes")
            if codes is not None:
                assert codes["containerName"] in self.containers
                if code in codes["values"] and codes["containerName"] == self.container["name"]:
                    return str(rule["action"])
            elif disrupted:
                return str(rule["action"])
        return "Count"


def expanded(text: str, known: Mapping[str, str]) -> str:
    """``text`` with variables put in as the kubelet does: $(NAME), where it is known."""

    def put(found: re.Match[str]) -> str:
        if found[0].startswith("$$"):
            return found[0][1:]
        return known.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([-._a-zA-Z0-9]+)\)", put, text)


def jobs_of(documents: Sequence[Object]) -> list[Job]:
    """The Jobs of a file, as the controllers make them."""
    kinds = {one["kind"]: one for one in documents}
    if "Job" in kinds:
        return [
            Job(
                one["metadata"]["name"],
                one["metadata"]["labels"]["app.kubernetes.io/component"],
                one["spec"]["template"]["spec"].get("subdomain", ""),
                one["spec"],
            )
            for one in documents
            if one["kind"] == "Job"
        ]
    name = next(one["metadata"]["name"] for one in documents if one["kind"] != "NetworkPolicy")
    if "TrainJob" in kinds:
        name = kinds["TrainJob"]["metadata"]["name"]
        runtime = kinds["TrainingRuntime"]
        assert kinds["TrainJob"]["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
        spec = runtime["spec"]["template"]["spec"]
    else:
        name, spec = kinds["JobSet"]["metadata"]["name"], kinds["JobSet"]["spec"]
    found = []
    for one in spec["replicatedJobs"]:
        template = one["template"]
        if "metadata" in template:  # Kubeflow counts the pods of this one
            nodes = kinds["TrainingRuntime"]["spec"]["mlPolicy"]["numNodes"]
            template["spec"] |= {"completions": nodes, "parallelism": nodes}
        subdomain = spec.get("network", {}).get("subdomain", "")
        for number in range(one["replicas"]):
            own = f"{name}-{one['name']}-{number}"
            found.append(Job(own, one["name"], subdomain, template["spec"], number))
    return found


@dataclass
class State:
    """How one index of a Job goes."""

    container: str = ""
    starts: int = 0
    failures: int = 0
    disrupted: bool = False
    done: str = ""
    codes: list[int] = field(default_factory=list)


class Player:
    """The pods of the file ``documents`` in the engine; ``folder`` has what they mount."""

    def __init__(self, documents: Sequence[Object], folder: Path) -> None:
        self.documents, self.folder = documents, folder
        self.jobs = jobs_of(documents)
        self.label = f"spartito-pods={secrets.token_hex(4)}"
        self.network = self.label.replace("=", "-")
        self.states = {(job.role, i): State() for job in self.jobs for i in _indices(job)}
        self.failed: set[str] = set()
        self.said: list[str] = []
        self._files = 0
        folder.chmod(0o755)
        docker("network", "create", "--label", self.label, self.network)

    @property
    def runs(self) -> Path:
        """The claim of the run folders."""
        (found,) = {
            volume["persistentVolumeClaim"]["claimName"]
            for job in self.jobs
            for volume in job.pod["volumes"]
            if volume["name"] == "runs"
        }
        return self._claim(found)

    def start(self) -> None:
        """Start all pods at once, as a Job does."""
        for job in self.jobs:
            for index in _indices(job):
                self._start(job, index)

    def follow(self, until: Any = None) -> bool:
        """Do what the controllers do until all Jobs have ended, or ``until`` says so.

        Returns:
            Whether all Jobs are complete.
        """
        while not (until is not None and until()):
            for job in self.jobs:
                for index in _indices(job):
                    self._look(job, index)
            open_ = [one for one in self.states.values() if not one.done]
            if self._is_over() or not open_:
                self._end()
                return not self.failed
            time.sleep(PAUSE)
        return False

    @property
    def are_ready(self) -> bool:
        """Whether all pods say so, when their probes are asked."""
        for job in self.jobs:
            probe = job.container["readinessProbe"]["exec"]["command"]
            for index in _indices(job):
                docker("exec", self.states[job.role, index].container, *probe)
        return True

    def crash(self, role: str, index: int) -> None:
        """Kill a pod's processes."""
        docker("kill", self.states[role, index].container)

    def delete(self, role: str, index: int, evicted: bool = False) -> None:
        """Delete a pod, with its grace; the cluster says so where it is ``evicted``."""
        job = next(one for one in self.jobs if one.role == role)
        state = self.states[role, index]
        state.disrupted = evicted
        grace = job.pod["terminationGracePeriodSeconds"]
        docker("stop", "--time", str(grace), state.container)

    def close(self) -> None:
        """Remove all of it."""
        mine = ("--filter", f"label={self.label}")
        if listed := docker("ps", "-aq", *mine).split():
            docker("rm", "--force", *listed)
        docker("network", "rm", self.network)

    def _look(self, job: Job, index: int) -> None:
        state = self.states[job.role, index]
        if state.done or not state.container:
            return
        status, code = docker(
            "inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", state.container
        ).split()
        if status not in ("exited", "dead"):
            return
        self._say(job, index, state, int(code))
        state.codes.append(int(code))
        if code == "0":
            state.done = "complete"
            return
        action = job.action(int(code), state.disrupted)
        if action == "FailJob":
            self.failed.add(job.role)
            state.done = "failed"
            return
        state.failures += action == "Count"
        if state.failures > job.spec.get("backoffLimitPerIndex", 6):
            state.done = "failed"
            lost = sum(self.states[job.role, i].done == "failed" for i in _indices(job))
            over = all(self.states[job.role, i].done for i in _indices(job))
            most = {"maxFailedIndexes": job.spec["completions"], **job.spec}["maxFailedIndexes"]
            if over or lost > most:
                self.failed.add(job.role)
            return
        self._start(job, index)  # it has ended: podReplacementPolicy Failed

    def _is_over(self) -> bool:
        """Whether a Job that failed ends the others, or those that count are complete."""
        if self.failed and self.is_one_object:
            return True
        wanted = self._targets()
        return all(
            self.states[job.role, i].done == "complete"
            for job in self.jobs
            if job.role in wanted
            for i in _indices(job)
        )

    @property
    def is_one_object(self) -> bool:
        return len(self.jobs) == 1 or not any(one["kind"] == "Job" for one in self.documents)

    def _targets(self) -> list[str]:
        for one in self.documents:
            spec = one["spec"].get("template", {}).get("spec") if "spec" in one else None
            for each in (spec, one.get("spec")):
                if isinstance(each, dict) and "successPolicy" in each:
                    found: list[str] = each["successPolicy"]["targetReplicatedJobs"]
                    return found
        return [job.role for job in self.jobs]

    def _end(self) -> None:
        for job in self.jobs:
            for index in _indices(job):
                state = self.states[job.role, index]
                if not state.done:
                    docker("stop", "--time", "5", state.container)
                    self._say(job, index, state, -1)
                    state.done = "ended"

    def _say(self, job: Job, index: int, state: State, code: int) -> None:
        words = ["docker", "logs", state.container]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        printed = done.stdout + done.stderr
        self.said.append(f"--- {job.host(index)} ended with {code}\n{printed}")

    def _start(self, job: Job, index: int) -> None:
        state = self.states[job.role, index]
        state.starts, state.disrupted = state.starts + 1, False
        if state.container:
            docker("rm", "--force", state.container)
        own = self.folder / "pods" / f"{job.host(index)}-{state.starts}"
        for first in job.pod.get("initContainers", []):
            docker("run", *self._options(job, index, first, own, init=True))
        words = self._options(job, index, job.container, own)
        state.container = docker("run", "--detach", *words).strip()

    def _options(
        self, job: Job, index: int, container: Object, own: Path, init: bool = False
    ) -> list[str]:
        """The words of ``docker run`` for a container of a pod."""
        rights, pod = container["securityContext"], job.pod["securityContext"]
        host = job.host(index)
        words = ["--label", self.label, "--network", self.network, "--hostname", host]
        if not init:
            words += ["--network-alias", host, "--network-alias", f"{host}.{job.subdomain}"]
        words += ["--user", f"{pod['runAsUser']}:{pod['runAsGroup']}"]
        words += ["--read-only"] if rights["readOnlyRootFilesystem"] else []
        words += [f"--cap-drop={one}" for one in rights["capabilities"]["drop"]]
        if not rights["allowPrivilegeEscalation"]:
            words += ["--security-opt", "no-new-privileges:true"]
        words += ["--init"] if job.pod["shareProcessNamespace"] else []
        limits = container["resources"]["limits"]
        words += ["--memory", limits["memory"].replace("i", "").lower()]
        if "workingDir" in container:
            words += ["--workdir", container["workingDir"]]
        if not init:
            for name, value in job.environment(index).items():
                words += ["--env", f"{name}={value}"]
        volumes = {volume["name"]: volume for volume in job.pod["volumes"]}
        for mount in container["volumeMounts"]:
            words += self._mounted(volumes[mount["name"]], mount, own)
        known = {} if init else job.environment(index)
        return [*words, container["image"], *(expanded(w, known) for w in container["command"])]

    def _mounted(self, volume: Object, mount: Object, own: Path) -> list[str]:
        path, name = mount["mountPath"], volume["name"]
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            size = volume["emptyDir"]["sizeLimit"].replace("i", "").lower()
            return ["--tmpfs", f"{path}:exec,mode=1777,size={size}"]
        if "emptyDir" in volume:
            folder = _folder(own / name)
        elif "persistentVolumeClaim" in volume:
            folder = self._claim(volume["persistentVolumeClaim"]["claimName"])
        elif "secret" in volume:
            folder = _folder(self.folder / "secret")
            if not (folder / "secret").exists():
                (folder / "secret").write_text(secrets.token_hex(32))
        else:
            wanted = volume["configMap"]["name"]
            folder = _folder(self.folder / wanted)
            for one in self.documents:
                if one["kind"] == "ConfigMap" and one["metadata"]["name"] == wanted:
                    for key, text in one["data"].items():
                        (folder / key).write_text(text)
        return ["--volume", f"{folder}:{path}{':ro' if mount.get('readOnly') else ''}"]

    def _claim(self, name: str) -> Path:
        return _folder(self.folder / "claims" / name)


def _indices(job: Job) -> Iterator[int]:
    return iter(range(job.spec["completions"]))


def _folder(path: Path) -> Path:
    """A folder of the pods' user."""
    if not path.exists():
        path.mkdir(parents=True)
        shutil.chown(path, 1000, 1000)
        os.chmod(path, 0o2775)
    return path
