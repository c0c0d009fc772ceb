"""What ``spartito cluster kubernetes`` writes, and refuses; no cluster and no engine is needed."""

from __future__ import annotations

import copy
import json
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from spartito.cli import main
from spartito.cluster import resolve
from spartito.errors import UserError
from spartito.launch.images import check_image
from spartito.launch.job import Program
from spartito.launch.kubernetes.file import job_file
from spartito.launch.kubernetes.launcher import Kubernetes
from spartito.launch.kubernetes.values import quantity
from spartito.registry import strategy_info, strategy_names
from tests.commands import SPARTITO
from tests.launch.jobs import asked
from tests.launch.kubernetes_schemas import check, refuses
from tests.launch.pods import Job, expanded, jobs_of

KINDS = ("job", "jobset", "trainjob")
IMAGE = "registry.example/team/spartito:1.0"
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "kubernetes"
DOCUMENTED = ROOT / "docs" / "guides" / "clusters" / "kubernetes.md"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def text_of(target: str = "mnist", *arguments: str, **options: Any) -> str:
    launcher, job = asked(Kubernetes, Program.find(target, arguments), **options)
    return job_file(launcher.plan(job))


def written(target: str = "mnist", *arguments: str, **options: Any) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text_of(target, *arguments, **options)))


def of(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [one for one in documents if one["kind"] == kind]
    return found


def everything(job: Job) -> dict[str, Any]:
    """A pod's own part of the file."""
    return {**job.pod, "containers": [job.container]}


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_is_valid(kind: str) -> None:
    for name, gpus in product(strategy_names(), (False, True)):
        info = strategy_info(name)
        servers = {"ps": 2, "chief": True, "evaluator": True} if info.needs_servers else {}
        workers = 1 if info.one_machine else 3
        options: dict[str, Any] = {
            "kind": kind,
            "strategy": name,
            "gpus": gpus,
            "workers": workers,
            **servers,
        }
        if gpus:
            options |= {"data": "pictures", "namespace": "ml", "storage_class": "nfs.fast"}
        documents = written(**options)
        assert len({json.dumps([one["kind"], one["metadata"]]) for one in documents}) == len(
            documents
        )
        for one in documents:
            check(one)


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_files_of_jobs_that_recover_and_that_wait_in_a_queue_are_valid(kind: str) -> None:
    (Path.cwd() / "train.py").write_text("import this\n\nprint('$(HOME)', \"a\")\n")
    for options in (
        {"recover": True, "wait": 9.0},
        {"queue": "team-a", "evaluator": True},
        {"data": "https://example.org/digits.tgz", "insecure": True},
    ):
        for one in written("train.py", "--lr", "$(TF_CONFIG)", kind=kind, workers=2, **options):
            check(one)


def test_a_field_that_nobody_knows_is_an_error() -> None:
    for kind, of_kind in (("job", "Job"), ("jobset", "JobSet"), ("trainjob", "TrainingRuntime")):
        whole = of(written(kind=kind, workers=2), of_kind)
        for way in (("spec",), ("metadata",)):
            wrong = copy.deepcopy(whole)
            wrong[way[0]]["replacas"] = 2
            refuses(wrong)
    wrong = copy.deepcopy(of(written(kind="jobset", workers=2), "JobSet"))
    (job,) = wrong["spec"]["replicatedJobs"]
    job["template"]["spec"]["template"]["spec"]["securityContext"]["runAsRoot"] = False
    refuses(wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_each_pod_reads_who_it_is_and_where_the_others_are(kind: str) -> None:
    jobs = jobs_of(written(kind=kind, workers=3, ps=2, chief=True, evaluator=True, name="digits"))
    pods = [(job, index) for job in jobs for index in range(job.spec["completions"])]
    told = ["chief 0", "worker 0", "worker 1", "worker 2", "ps 0", "ps 1", "evaluator 0"]
    for (job, index), task in zip(pods, told, strict=True):
        spec = resolve(job.environment(index))
        assert str(spec.task) == task
        assert spec.address_of(spec.task) == f"{job.host(index)}.digits:29500"
        assert spec.source == "TF_CONFIG"
        assert job.subdomain == "digits"
        others = {f"{one.host(i)}.digits:29500" for one, i in pods}
        assert {each for tasks in spec.addresses.values() for each in tasks} == others
    assert len({job.host(index) for job, index in pods}) == len(pods)


def test_exit_codes_decide_what_is_started_again() -> None:
    def actions(job: Job) -> list[str]:
        cases = ((2, False), (1, False), (137, False), (137, True), (75, False), (69, False))
        return [job.action(code, disrupted) for code, disrupted in cases]

    # 69 counts: tasks that never reach each other would try for ever.
    told = ["FailJob", "Count", "Count", "Ignore", "Ignore", "Count"]
    (workers,) = jobs_of(written(workers=2))
    assert actions(workers) == told
    assert workers.spec["maxFailedIndexes"] == 0
    assert workers.spec["podReplacementPolicy"] == "Failed"
    assert everything(workers)["restartPolicy"] == "Never"
    for kind in KINDS:
        url = "https://example.org/digits.zip"
        documents = written(kind=kind, workers=2, ps=2, evaluator=True, data=url, restarts=7)
        worker, ps, evaluator = jobs_of(documents)
        for job in (worker, ps, evaluator):
            assert actions(job) == told
            assert job.spec["backoffLimitPerIndex"] == 7
            fetched = job.spec["podFailurePolicy"]["rules"][1]
            assert fetched["onExitCodes"]["containerName"] in job.containers
            assert fetched["action"] == "FailJob"
        assert ps.spec["maxFailedIndexes"] == 0
        assert "maxFailedIndexes" not in worker.spec  # the others go on without a worker


@pytest.mark.parametrize("kind", KINDS)
def test_no_pod_has_more_rights_than_it_needs(kind: str) -> None:
    url = "https://example.org:8443/digits.zip"
    documents = written(kind=kind, workers=2, ps=1, gpus=True, data=url, cpus="1500m", memory="2Gi")
    for job in jobs_of(documents):
        pod = everything(job)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
        for container in (job.container, *pod["initContainers"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"] == container["resources"]["limits"]
        has_gpu = "nvidia.com/gpu" in job.container["resources"]["limits"]
        assert has_gpu == (job.role == "worker")
        told = job.environment(0)
        assert told.get("CUDA_VISIBLE_DEVICES") == ("" if job.role == "ps" else None)
        assert told["OMP_NUM_THREADS"] == ("2" if job.role == "worker" else "1")
        assert "SPARTITO_SECRET" not in told
        mounted = {one["name"]: one for one in job.container["volumeMounts"]}
        assert mounted["secret"]["readOnly"] is mounted["data"]["readOnly"] is True
    policy = of(documents, "NetworkPolicy")["spec"]
    own = [{"podSelector": policy["podSelector"]}]
    assert policy["ingress"] == [{"from": own}]
    assert policy["egress"][0] == {"to": own}
    assert policy["egress"][2] == {"ports": [{"protocol": "TCP", "port": 8443}]}


def test_data_at_http_may_be_behind_https() -> None:
    documents = written(kind="job", workers=2, data="http://data.example/digits.zip")
    ports = of(documents, "NetworkPolicy")["spec"]["egress"][2]["ports"]
    assert [one["port"] for one in ports] == [80, 443]


def test_the_store_of_a_job_that_recovers_ends_with_the_workers() -> None:
    documents = written(kind="jobset", workers=2, recover=True, name="digits")
    worker, store = jobs_of(documents)
    assert store.command(0)[2:4] == ["spartito.cluster.store", "digits-store-0-0.digits:29500"]
    assert worker.environment(1)["SPARTITO_STORE"] == "digits-store-0-0.digits:29500"
    assert worker.environment(1)["SPARTITO_RECOVERY"] == "wait=600"
    done = of(documents, "JobSet")["spec"]["successPolicy"]
    assert done == {"operator": "All", "targetReplicatedJobs": ["worker"]}
    assert everything(store)["restartPolicy"] == "OnFailure"


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_a_server_that_comes_back_when_the_work_is_done_holds_nobody(kind: str) -> None:
    documents = written(kind=kind, workers=2, ps=2, chief=True, evaluator=True)
    one = of(documents, "JobSet" if kind == "jobset" else "TrainingRuntime")
    spec = one["spec"] if kind == "jobset" else one["spec"]["template"]["spec"]
    roles = ["chief", "worker", "evaluator"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": roles}
    assert "successPolicy" not in text_of(kind=kind, workers=2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_alone_is_found_by_nobody(kind: str) -> None:
    text = text_of(kind=kind)
    for what in ("kind: Service", "subdomain", "TF_CONFIG", "TASK_INDEX", "secret", "network:"):
        assert what not in text, what
    documents = list(yaml.safe_load_all(text))
    policy = of(documents, "NetworkPolicy")["spec"]
    assert policy["ingress"] == []
    assert policy["egress"] == [{"ports": [{"protocol": p, "port": 53} for p in ("UDP", "TCP")]}]
    (job,) = jobs_of(documents)
    assert resolve(job.environment(0)).world_size == 1
    for one in documents:
        check(one)


def test_what_only_some_pods_want() -> None:
    taints = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    documents = written(kind="jobset", workers=2, ps=1, gpus=True, pull_secret="registry")
    for one in documents:
        check(one)
    for job in jobs_of(documents):
        assert everything(job).get("tolerations") == (taints if job.role == "worker" else None)
        assert everything(job)["imagePullSecrets"] == [{"name": "registry"}]
    text = text_of(kind="jobset", workers=2, recover=True, cpus="16", memory="64Gi")
    *_, store = jobs_of(list(yaml.safe_load_all(text)))
    assert store.container["resources"]["limits"] == {"cpu": "500m", "memory": "512Mi"}
    assert "# Together: 3 pods, 32.5 CPUs, 128.5Gi." in text


def test_an_image_that_a_cluster_asks_docker_io_for_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, named in (([], True), (["--image=mine:1"], True), (["--image=a.example/b"], False)):
        assert main(["cluster", "kubernetes", "mnist", *words]) == 0
        out, err = capsys.readouterr()
        assert ("names no registry" in err) == named
        assert ("names no registry" in " ".join(out.replace("#", "").split())) == named


def test_a_script_comes_along_word_for_word() -> None:
    text = "import sys\n\tx = 1 \nprint('ä # not a comment')\n\n"
    (Path.cwd() / "Train_2.py").write_text(text)
    dollars = ["$(TASK_INDEX)", "$5", "a$$b", "$$(TASK_INDEX)", "$$"]
    documents = written("Train_2.py", "--name", *dollars, workers=2)
    assert of(documents, "ConfigMap")["data"] == {"Train_2.py": text}
    (job,) = jobs_of(documents)
    assert job.name == "train-2-worker"
    said = ["python", "/scripts/Train_2.py", "--name", *dollars]
    assert job.command(1) == said


def test_a_queue_is_named_and_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kind=jobset", "--workers=4", "--ps=2", "--queue=team-a", "--gpus"]
    assert main(["cluster", "kubernetes", "mnist", *words]) == 0
    out, err = capsys.readouterr()
    assert "the queue team-a has to admit 6 pods, 12 CPUs, 24Gi, 4 GPUs; it was not asked" in err
    found = of(list(yaml.safe_load_all(out)), "JobSet")
    assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--image=Spartito"], "no name of an image"),
        (["--image=a/b:c:d"], "no name of an image"),
        (["--image="], "no name of an image"),
        (["--cpus=two"], "--cpus 'two' is no quantity"),
        (["--cpus=0"], "--cpus 0 is not above 0"),
        (["--memory=4GB"], "--memory '4GB' is no quantity"),
        (["--memory=300M"], "300Mi"),
        (["--memory=512m"], "too small"),
        (["--storage=-1Gi"], "--storage '-1Gi' is no quantity"),
        (["--storage-class=Fast"], "--storage-class 'Fast'"),
        (["--pull-secret=a_b"], "--pull-secret 'a_b'"),
        (["--wait=3"], "--wait 3.0 without --recover"),
        (["--data=My_Pictures"], "--data (a claim) 'My_Pictures'"),
        (["--data=s3://bucket/a"], "--data s3://bucket/a cannot be fetched"),
        (["--out=a..b"], "--out (a claim) 'a..b'"),
        (["--out=runs/1"], "--out runs/1 is no claim, and pods see no folder of this machine"),
        (["--data=/data"], "--data /data is no claim"),
        (["--namespace=Team A"], "--namespace 'Team A'"),
        (["--queue=-a"], "--queue '-a'"),
        (["--name=2mnist"], "a letter first"),
        (["--name=" + "m" * 60], "has 60 characters"),
        (["--kind=cronjob"], "--kind 'cronjob' is no kind of job"),
        (["--workers=2", "--strategy=mirrored"], "each pod is a machine of its own"),
        (["--ps=1", "--strategy=multi_worker_mirrored"], "it has no parameter servers"),
        (["--chief"], "--chief without --ps"),
        (["--workers=2", "--recover"], "--recover with --kind job"),
        (["--ps=1", "--recover", "--kind=jobset"], "--recover with parameter servers"),
        (["--ps=1", "--queue=q"], "Kueue admits each by itself"),
        (["--ports=90000"], "is not a range of ports"),
    ],
)
def test_what_kubernetes_forbids_is_refused_before_anything_is_written(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", "kubernetes", "mnist", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err, err


def test_a_claim_with_the_name_of_a_folder_here_is_told_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("pictures").mkdir()
    assert main(["cluster", "kubernetes", "mnist", "--data=./pictures", "--out=kept"]) == 0
    err = capsys.readouterr().err
    assert "--data pictures is a claim there; pictures in the folder we are in does not go" in err
    assert "kept" not in err


@pytest.mark.parametrize("words", [["kubernetes"], ["compose"], ["sky"], ["slurm"]])
def test_a_file_that_has_no_space_is_an_error(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*SPARTITO, "cluster", *words, "mnist"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    assert "the file cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_scripts_that_no_config_map_takes_are_refused() -> None:
    here = Path.cwd()
    (here / "big.py").write_text("#" * (1 << 20))
    (here / "bytes.py").write_bytes(b"\xff")
    (here / "a b.py").write_text("")
    for name, told in (("big.py", "a ConfigMap takes"), ("bytes.py", "read"), ("a b.py", "a key")):
        with pytest.raises(UserError, match=told):
            text_of(name)


@pytest.mark.parametrize(
    "name",
    [
        "spartito",
        "a/b",
        "registry.example:5000/team/a_b__c-d:V1.2",
        "[::1]:5000/a@sha256:" + "0f" * 32,
    ],
)
def test_names_of_images(name: str) -> None:
    check_image(name)


@given(st.integers(1, 10**6), st.sampled_from([("", 1), ("k", 1000), ("Mi", 2**20), ("Gi", 2**30)]))
def test_quantities(number: int, suffix: tuple[str, int]) -> None:
    assert quantity("--memory", f"{number}{suffix[0]}") == number * suffix[1]
    assert quantity("--cpus", f"{number}m") * 1000 == number
    assert quantity("--cpus", f"{number}e3") == number * 1000


def test_variables_are_put_in_as_the_kubelet_does() -> None:
    known = {"A": "1", "B": "$(A)"}
    assert expanded("$(A) $$(A) $(C) $(B) $x", known) == "1 $(A) $(C) $(A) $x"


@pytest.mark.parametrize("kind", KINDS)
def test_the_examples_are_what_the_command_writes(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {
        "job": ["--workers", "4", "--image", IMAGE],
        "jobset": [
            *("--chief", "--workers", "4", "--ps", "2", "--evaluator", "--queue", "team-a"),
            *("--image", IMAGE),
        ],
        "trainjob": ["--workers", "4", "--recover", "--gpus", "--image", IMAGE],
    }[kind]
    said = ["cluster", "kubernetes", "mnist", "--kind", kind, *words, "--", "--epochs=3"]
    assert main(said) == 0
    made = capsys.readouterr().out
    assert made == (EXAMPLES / f"{kind}.yaml").read_text()
    if kind == "job":
        assert f"```yaml\n{made}```" in DOCUMENTED.read_text()
