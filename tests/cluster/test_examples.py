"""The worked examples of the pages on clusters and containers say what they say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from spartito.cli import main
from spartito.cluster import resolve

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
PAGES = [page.read_text() for page in (*GUIDES.glob("clusters/*.md"), GUIDES / "containers.md")]


def section(title: str) -> str:
    """What one of the pages says under a heading of the second level."""
    (found,) = (page for page in PAGES if f"\n## {title}\n" in page)
    return found.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


WRITTEN = [
    line
    for page in PAGES
    for line in re.findall(r"^(spartito cluster \w+ .*) > \S+$", page, re.MULTILINE)
]
"""The commands whose output is a file."""


def test_every_engine_has_an_example() -> None:
    written = {shlex.split(line)[2] for line in WRITTEN}
    assert written == {"compose", "kubernetes", "slurm", "sky", "dstack"}
    assert "SPARTITO_ENGINE=podman spartito cluster up compose.yaml" in section("Start, look, stop")


@pytest.mark.parametrize("line", WRITTEN)
def test_the_commands_that_write_a_file_write_one(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spartito-0.1.0-py3-none-any.whl").write_text("")
    (tmp_path / "train.py").write_text("")
    (tmp_path / "spartito.sif").write_bytes(b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0")
    _, *words = shlex.split(line)
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "names no registry" not in err
    if words[1] == "slurm":
        assert out.startswith("#!/bin/bash\n")
    else:
        assert all(isinstance(one, dict) for one in yaml.safe_load_all(out))


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
