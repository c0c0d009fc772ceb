"""A member of a group over servers is lost: its group is started again as one, or the job ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import SPARTITO, Commands, commands_in

SCRIPT = Path(__file__).with_name("member_script.py")
GROUPS = (
    "--strategy", "parameter_server", "--strategy-options", '{"groups": 2, "every": 3}',
    "--workers", "4", "--ps", "1",
)  # fmt: skip


def holding(inside: str) -> tuple[str, ...]:
    """A job whose groups hold another strategy, and that has a chief of its own."""
    strategy = f"parameter_server(groups=2, every=3, inside={inside})"
    return "--strategy", strategy, "--workers", "4", "--ps", "1", "--chief"


pytestmark = pytest.mark.slow


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as found:
        yield found


@pytest.mark.parametrize(
    ("victim", "mate", "number"),
    [("worker 3", "worker 2", "SIGKILL"), ("worker 2", "worker 3", "SIGKILL")],
)
def test_a_group_is_started_again_as_one(
    commands: Commands, victim: str, mate: str, number: str
) -> None:
    env = {"SPARTITO_TEST_VICTIM": victim, "SPARTITO_TEST_NUMBER": number}
    job = commands.start(*SPARTITO, "run", *GROUPS, SCRIPT, env=env)
    ended = job.end()
    assert ended.code == 0, ended.text
    assert f"{victim} was killed by {number}" in ended.err
    assert f"{mate} lost {victim}, of its group; it is started again (1 of 3)" in ended.err
    assert "is gone: its process ended while" in ended.err
    for task in ("worker 0", "worker 1"):
        assert f"{task} has ended" in ended.out


@pytest.mark.parametrize("inside", ["", "mesh(model=2)"])
def test_a_member_that_stands_still_is_replaced_with_its_group(
    commands: Commands, inside: str
) -> None:
    env = {
        "SPARTITO_TEST_VICTIM": "worker 3",
        "SPARTITO_TEST_NUMBER": "SIGSTOP",
        "SPARTITO_TIMEOUT": "15",
    }
    given = holding(inside) if inside else GROUPS
    ended = commands.start(*SPARTITO, "run", *given, SCRIPT, env=env).end()
    assert ended.code == 0, ended.text
    assert "worker 2 lost worker 3, of its group; it is started again (1 of 3)" in ended.err


def test_a_member_of_the_chiefs_group_ends_the_job(commands: Commands) -> None:
    env = {"SPARTITO_TEST_VICTIM": "worker 1", "SPARTITO_TEST_NUMBER": "SIGKILL"}
    ended = commands.start(*SPARTITO, "run", *GROUPS, SCRIPT, env=env).end()
    assert ended.code == 69, ended.text
    assert "because worker 1 was killed by SIGKILL" in ended.err
    assert "started again" not in ended.err


@pytest.mark.parametrize("inside", ["mirrored", "sharded(zero=3)", "mesh(model=2)"])
def test_with_a_chief_of_its_own_the_job_goes_on(commands: Commands, inside: str) -> None:
    env = {"SPARTITO_TEST_VICTIM": "worker 1", "SPARTITO_TEST_NUMBER": "SIGKILL"}
    ended = commands.start(*SPARTITO, "run", *holding(inside), SCRIPT, env=env).end()
    assert ended.code == 0, ended.text
    assert "worker 0 lost worker 1, of its group; it is started again (1 of 3)" in ended.err
