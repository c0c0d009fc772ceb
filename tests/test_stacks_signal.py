"""The signal upon which a task writes its stacks does not end one that is ending itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from spartito.heartbeat import SIZE
from spartito.names import ENV_HEARTBEAT

ASKED_LATE = """
import faulthandler, os
from spartito import heartbeat
heartbeat.begin()
os.kill(os.getpid(), heartbeat.STACKS_SIGNAL)
faulthandler.unregister(heartbeat.STACKS_SIGNAL)  # as the interpreter does when it ends
os.kill(os.getpid(), heartbeat.STACKS_SIGNAL)
print("lives")
"""


def test_a_task_that_ends_may_be_asked_for_its_stacks(tmp_path: Path) -> None:
    path = tmp_path / "worker"
    path.write_bytes(bytes(SIZE))
    ended = subprocess.run(
        [sys.executable, "-c", ASKED_LATE],
        env={ENV_HEARTBEAT: str(path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (0, "lives\n"), ended.stderr
    assert any("Current thread" in file.read_text(errors="replace") for file in tmp_path.iterdir())
