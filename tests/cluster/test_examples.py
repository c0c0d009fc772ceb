"""The worked examples of docs/clusters.md say what they say."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from spartito.cluster import resolve

PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_tf_config() -> None:
    (text,) = re.findall(r"export TF_CONFIG='(.*)'", section("TF_CONFIG"))
    spec = resolve({"TF_CONFIG": text})
    assert (spec.rank, spec.world_size) == (0, 2)
    assert resolve({"TF_CONFIG": text.replace('"index": 0', '"index": 1')}).rank == 1


def test_the_indexed_job() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", section("Kubernetes"), re.DOTALL)
    service, job = yaml.safe_load_all(text)
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    env = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
    tasks = [
        resolve(env | {"JOB_COMPLETION_INDEX": str(index)})
        for index in range(job["spec"]["completions"])
    ]
    assert [str(spec.task) for spec in tasks] == ["worker 0", "worker 1", "ps 0"]
    assert tasks[0].rendezvous == "train-0.train:29500"


def test_the_file(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", section("A file"), re.DOTALL)
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    spec = resolve({"SPARTITO_CLUSTER": str(path), "SPARTITO_TASK": "ps 0"})
    assert spec.addresses == {"worker": ("a:29500", "b:29500"), "ps": ("a:29501",)}
