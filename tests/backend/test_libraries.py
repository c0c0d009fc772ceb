"""Scripts of other libraries run when one word of them changes, and print the same numbers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.commands import TORCHRUN, commands_in
from tests.skips import skip

SCRIPTS = Path(__file__).with_name("scripts")
PACKAGES = {"lightning": "pytorch_lightning", "accelerate": "accelerate"}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("library", PACKAGES)
def test_the_numbers_of_gloo(tmp_path: Path, library: str) -> None:
    if find_spec(PACKAGES[library]) is None:
        skip("dev", PACKAGES[library])
    script = SCRIPTS / f"with_{library}.py"
    found = {}
    for backend in ("gloo", "spartito"):
        with commands_in(tmp_path) as commands:
            run = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", script, backend)
            ended = commands.start(*run).end()
        found[backend] = [line for line in ended.out.splitlines() if line.startswith("loss")]
        assert f"backend {backend}" in ended.out, ended.text
        assert ended.code == 0 or backend == "gloo", ended.text  # whose end aborts now and then
    assert found["spartito"] == found["gloo"]
    assert len(found["gloo"]) == 3
