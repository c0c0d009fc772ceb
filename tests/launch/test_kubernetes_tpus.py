"""Jobs on TPU slices of GKE, as ``spartito cluster kubernetes --tpu`` writes them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from spartito.cli import main
from spartito.cluster import resolve
from spartito.cluster.tpu import slice_of
from spartito.errors import UserError
from spartito.launch.kubernetes.tpus import GENERATIONS, parse_tpu
from spartito.launch.processes.tpus import of_tpu
from spartito.system.tpus import Attached
from tests.commands import SPARTITO
from tests.launch.kubernetes_schemas import check, refuses
from tests.launch.pods import Job, jobs_of

IMAGE = "registry.example/team/spartito:1.0"
EXAMPLES = Path(__file__).parents[2] / "examples" / "kubernetes"
FILES = {
    "tpu-job.yaml": ["--tpu=v6e:2x4"],
    "tpu-jobset.yaml": ["--tpu=v5e:4x4", "--slices=2", "--kind=jobset"],
}


def written(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["cluster", "kubernetes", "mnist", *words, "--", "--epochs=3"]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("text", "label", "chips", "hosts", "tasks"),
    [
        ("v5e:1x1", "tpu-v5-lite-podslice", 1, 1, 1),
        ("v5e:2x2", "tpu-v5-lite-podslice", 4, 1, 4),
        ("v5e:2x4", "tpu-v5-lite-podslice", 8, 1, 8),
        ("v5e:4x4", "tpu-v5-lite-podslice", 4, 4, 4),
        ("v5e:16x16", "tpu-v5-lite-podslice", 4, 64, 4),
        ("v6e:4x8", "tpu-v6e-slice", 4, 8, 4),
        ("v4:2x2x1", "tpu-v4-podslice", 4, 1, 4),
        ("v4:2x2x2", "tpu-v4-podslice", 4, 2, 4),
        ("v5p:4x4x8", "tpu-v5p-slice", 4, 32, 4),
        ("v5p:16x16x24", "tpu-v5p-slice", 4, 1536, 4),
        ("tpu7x:2x2x1", "tpu7x", 4, 1, 8),
        ("tpu7x:4x4x4", "tpu7x", 4, 16, 8),
    ],
)
def test_slices_are_hosts_with_chips(
    text: str, label: str, chips: int, hosts: int, tasks: int
) -> None:
    found = parse_tpu(text)
    assert (found.accelerator, found.chips, found.hosts, found.tasks) == (
        label,
        chips,
        hosts,
        tasks,
    )
    assert found.topology == text.partition(":")[2]


@pytest.mark.parametrize("name", GENERATIONS)
def test_every_listed_slice_is_whole_hosts(name: str) -> None:
    for topology in GENERATIONS[name].topologies:
        found = parse_tpu(f"{name}:{topology}")
        sides = [int(side) for side in topology.split("x")]
        product = sides[0] * sides[1] * (sides[2] if len(sides) == 3 else 1)
        assert found.chips * found.hosts == product


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("v5e", "names no TPU"),
        ("v9:4x4", "v4, v5e, v5p, v6e, tpu7x"),
        ("v5e:4x2", "It has 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16."),
        ("v5e:4x4x4", "no slice '4x4x4' of v5e"),
        ("v5p:4x4", "2x2x1, 2x2x2, 2x2x4, 2x4x4, or sides that are multiples of 4"),
        ("v5p:8x4x4", "rising order"),
        ("v5p:16x24x24", "at most 6144 chips"),
        ("v6e:", "no slice ''"),
        ("v4:0x0x0", "no slice '0x0x0'"),
        ("v4:4x4xa", "no slice '4x4xa'"),
    ],
)
def test_slices_that_do_not_exist_are_refused(text: str, told: str) -> None:
    with pytest.raises(UserError) as error:
        parse_tpu(text)
    assert told in str(error.value)


@pytest.mark.parametrize("name", FILES)
def test_the_examples_are_what_the_command_writes(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*FILES[name], "--image", IMAGE]
    assert main(["cluster", "kubernetes", "mnist", *words, "--", "--epochs=3"]) == 0
    assert capsys.readouterr().out == (EXAMPLES / name).read_text()


def test_every_file_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (*FILES.values(), ["--tpu=v4:2x2x4", "--kind=jobset", "--queue=team-a"]):
        for one in written(capsys, *words):
            check(one)
    (one,) = [o for o in written(capsys, *FILES["tpu-jobset.yaml"]) if o["kind"] == "JobSet"]
    one["metadata"]["annotation"] = {}
    refuses(one)


def asks(job: Job) -> tuple[dict[str, str], str]:
    limits = job.container["resources"]["limits"]
    assert job.container["resources"]["requests"] == limits
    return job.pod["nodeSelector"], limits["google.com/tpu"]


def test_one_host_is_a_pod_that_starts_a_process_for_each_chip(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (job,) = jobs_of(written(capsys, *FILES["tpu-job.yaml"]))
    assert asks(job) == (
        {
            "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
            "cloud.google.com/gke-tpu-topology": "2x4",
        },
        "8",
    )
    assert job.spec["completions"] == job.spec["parallelism"] == 1
    words = ["spartito", "run", "--no-config", "--workers=8", "-m", "spartito.recipes.mnist"]
    assert job.command(0)[:6] == words
    told = job.environment(0)
    assert resolve(told).world_size == 1
    assert "OMP_NUM_THREADS" not in told
    assert "TF_CONFIG" not in told


def test_pods_of_several_slices_know_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    documents = written(capsys, *FILES["tpu-jobset.yaml"])
    jobs = jobs_of(documents)
    assert [job.name for job in jobs] == ["mnist-worker-0", "mnist-worker-1"]
    (found,) = [one for one in documents if one["kind"] == "JobSet"]
    assert found["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    ranks = []
    for job in jobs:
        assert asks(job)[1] == "4"
        assert job.spec["completions"] == 4
        for index in range(4):
            env = job.environment(index)
            spec = resolve(env)
            assert spec.source == "Cloud TPU"
            assert (spec.world_size, spec.rendezvous) == (8, "mnist-worker-0-0.mnist:29500")
            ranks.append(spec.rank)
            here = slice_of(env)
            assert here is not None
            assert here.hosts[index] == f"{job.host(index)}.{job.subdomain}"
            variables, odd = of_tpu(env, Attached("v5e", 4), here, 8, 4)
            assert (variables["TORCH_TPU_TOPOLOGY"], odd) == ("4,4,1", "")
    assert ranks == list(range(8))


def test_a_job_of_one_slice_needs_no_jobset(capsys: pytest.CaptureFixture[str]) -> None:
    (job,) = jobs_of(written(capsys, "--tpu=v5p:2x2x2", "--workers=8"))
    specs = [resolve(job.environment(index)) for index in range(2)]
    assert [spec.rank for spec in specs] == [0, 1]
    assert specs[0].rendezvous == f"{job.host(0)}.mnist:29500"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tpu=v5e:3x3"], "GKE has no slice '3x3' of v5e"),
        (["--tpu=v5e:4x4", "--gpus"], "--gpus with --tpu v5e:4x4"),
        (["--tpu=v5e:4x4", "--ps=1"], "--ps 1 with --tpu v5e:4x4"),
        (["--tpu=v5e:4x4", "--evaluator"], "--evaluator with"),
        (["--tpu=v5e:4x4", "--recover", "--kind=jobset"], "--recover with"),
        (["--tpu=v5e:4x4", "--ports=7000"], "--ports with"),
        (["--tpu=v5e:4x4", "--workers=4"], "that is 16 devices"),
        (["--tpu=v5e:4x4", "--slices=2"], "Use --kind jobset"),
        (["--tpu=v5e:4x4", "--kind=trainjob"], "--kind trainjob with --tpu"),
        (["--tpu=v5e:2x2", "--slices=2", "--kind=jobset"], "which is one host"),
        (["--slices=2"], "--slices 2 without --tpu"),
        (["--tpu=v5e:4x4", "--strategy=mirrored"], "mirrored"),
    ],
)
def test_what_cannot_be_on_a_slice_is_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", "kubernetes", "mnist", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err, err


def test_the_command_of_a_pod_is_one_that_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (job,) = jobs_of(written(capsys, "--tpu=v5e:2x2"))
    _, *words = job.command(0)
    words[words.index("--out=/runs/mnist")] = f"--out={tmp_path}"
    done = subprocess.run(
        [*SPARTITO, *words[:-1], "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "worker 3" in done.stdout
    assert "--epochs" in done.stdout
