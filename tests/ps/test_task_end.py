"""With which exit code a server's process ends, whatever its script would do next."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from spartito.errors import TaskLostError
from spartito.steps.task_end import serve_and_end
class Job:
    def server(self):
        raise {error}
serve_and_end(Job(), None)
"""


@pytest.mark.parametrize(
    ("error", "code"),
    [("ValueError('x')", 1), ("TaskLostError('x')", 69)],
)
def test_what_a_server_raises_is_its_exit_code(error: str, code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(error=error)], capture_output=True, text=True
    )
    assert ended.returncode == code, ended.stderr
    assert "x" in ended.stderr
