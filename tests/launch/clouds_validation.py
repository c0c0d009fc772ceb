"""Whether SkyPilot and dstack would take a file: they are asked themselves, without a network.

Their packages want others in versions that do not go with ours, so they are in an environment of
their own, whose Python ``SPARTITO_TEST_CLOUDS`` names; ``.ci/run`` makes one by
``scripts/clouds``.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence

from tests.skips import need, skip

ENV = "SPARTITO_TEST_CLOUDS"

ASK = """
import json, sys

import yaml
from dstack._internal.core.models.configurations import parse_run_configuration
from sky import Task

secret = [("SPARTITO_SECRET", "x")]

told = []
for tool, text in json.load(sys.stdin):
    document = yaml.safe_load(text)
    try:
        if tool == "sky":
            given = secret if "secrets" in document else None
            nodes = document["num_nodes"]
            task = Task.from_yaml_config(document, secrets_overrides=given)  # takes it apart
            assert task.num_nodes == nodes
            task.to_yaml_config()
        else:
            found = parse_run_configuration(document)
            nodes = sum(one["nodes"] for one in document.get("groups", []))
            assert found.nodes_num == (nodes or document.get("nodes", 1))
        told.append("")
    except Exception as error:
        told.append(repr(error))
print(json.dumps(told))
"""


def complaints(files: Sequence[tuple[str, str]]) -> list[str]:
    """What the tools say against ``files``, each with the name of its tool; skips without them."""
    need("clouds")
    python = os.environ.get(ENV)
    if python is None:
        skip("clouds", f"{ENV} names no Python with skypilot and dstack: see scripts/clouds")
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [python, "-c", ASK],
            input=json.dumps(files),
            capture_output=True,
            text=True,
            timeout=120,
            cwd=home,
            env={"PATH": os.environ["PATH"], "HOME": home},
        )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found
