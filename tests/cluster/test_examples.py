"""The worked examples of docs/clusters.md say what they say."""

from __future__ import annotations

import re
from pathlib import Path

from spartito.cluster import resolve

PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_tf_config() -> None:
    (text,) = re.findall(r"export TF_CONFIG='(.*)'", section("TF_CONFIG"))
    spec = resolve({"TF_CONFIG": text})
    assert (spec.rank, spec.world_size) == (0, 2)
    assert resolve({"TF_CONFIG": text.replace('"index": 0', '"index": 1')}).rank == 1


def test_the_file(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", section("A file"), re.DOTALL)
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    spec = resolve({"SPARTITO_CLUSTER": str(path), "SPARTITO_TASK": "ps 0"})
    assert spec.addresses == {"worker": ("a:29500", "b:29500"), "ps": ("a:29501",)}
