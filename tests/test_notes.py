from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import commands_in

KEEPER_GONE = """
import os
before = dict(os.environ)
import spartito
assert before == dict(os.environ), "the import writes into the environment"
from torch.distributed import TCPStore
from spartito.collectives.membership.store import quiet_torch
quiet_torch()
assert before == dict(os.environ)
keeper = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
other = TCPStore("127.0.0.1", keeper.port)
other.set("a", "b")
del keeper
try:
    while True: other.check(["a"])
except RuntimeError:
    print("gone")
"""


@pytest.mark.slow
def test_torch_prints_no_frames_and_the_environment_stays_as_it_is(tmp_path: Path) -> None:
    with commands_in(tmp_path) as commands:
        ended = commands.python(commands.write("job.py", KEEPER_GONE))
        assert (ended.code, ended.out, ended.err) == (0, "gone\n", "")
        asked = commands.python("job.py", env={"TORCH_CPP_LOG_LEVEL": "WARNING"})
        assert "frame #" in asked.err
