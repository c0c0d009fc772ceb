"""With which exit code a server's process ends, whatever its script would do next."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import commands_in

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
def test_what_a_server_raises_is_its_exit_code(error: str, code: int, tmp_path: Path) -> None:
    with commands_in(tmp_path) as commands:
        commands.write("serves.py", PROGRAM.format(error=error))
        ended = commands.python("serves.py", forks=True)
    assert ended.code == code, ended.err
    assert "x" in ended.err
