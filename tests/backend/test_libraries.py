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
            program = commands.start(*run)
            found[backend] = [program.wait_for("loss .*")[0] for _ in range(3)]
            program.wait_for(f"backend {backend}")
            if backend == "spartito":  # a program on gloo aborts or hangs at its end now and then
                ended = program.end()
                assert ended.code == 0, ended.text
    assert found["spartito"] == found["gloo"]
