"""What a supervisor has started ends with it, however early it is killed."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from tests.commands import commands_in

ENLISTS = """
import os, subprocess, sys
from spartito.launch.processes.reaper import Reaper
reaper = Reaper()
child = subprocess.Popen(
    [sys.executable, "-S", "-c", "import time; print('runs', flush=True); time.sleep(300)"],
    start_new_session=True, preexec_fn=reaper.enlist(), env=dict(os.environ),
)
child.wait()
"""


def test_who_has_enlisted_ends_before_it_is_watched(tmp_path: Path) -> None:
    """It has no mark either, as a program that has just begun."""
    with commands_in(tmp_path) as commands:
        program = commands.start(sys.executable, commands.write("enlists.py", ENLISTS))
        program.wait_for("runs")
        program.send(signal.SIGKILL)
        assert program.end().code == -signal.SIGKILL  # `end` sees that nothing is left
