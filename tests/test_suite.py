"""The suite itself: it starts from a known state, shows where it stands, and skips in the open."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest

from spartito.notes import warn
from tests import at_night, commands, costs, skips
from tests.replicas import Job, ReplicaError, Replicas, warns

STRANGE = {
    "HOME": "/nonexistent/home",
    "LANG": "tr_TR.UTF-8",
    "LC_ALL": "C",
    "TMPDIR": "/nonexistent/temporary",
    "OMP_NUM_THREADS": "7",
    "SLURM_JOB_ID": "12",
    "RANK": "3",
    skips.ENV: "netns",
    skips.REFUSED: "slurm: no job: none ran\n",
}
BEGIN = 'trap "" INT HUP; umask 077; exec "$@"'


@pytest.fixture(scope="module")
def inner(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """What a suite prints that is started from a strange state, and its list of skips."""
    listed = tmp_path_factory.mktemp("inner") / "skips"
    pytest_ = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly"]
    words = [*pytest_, "tests/inner/suite.py", f"--skips-to={listed}"]
    done = subprocess.run(
        ["sh", "-c", BEGIN, "sh", *words],
        cwd=Path(__file__).parents[1],
        env={name: value for name, value in os.environ.items() if "TEST" not in name} | STRANGE,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout, listed.read_text().splitlines()


def failure(text: str, test: str) -> str:
    """What the suite says of a test that failed."""
    found = re.search(rf"^_+ {test} _+$(.*?)^(_+ test|=+)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, text
    return found[1]


@pytest.mark.slow
def test_a_suite_starts_from_a_known_state(inner: tuple[str, list[str]]) -> None:
    assert "4 failed, 1 passed, 2 skipped" in inner[0]
    assert "FAILED tests/inner/suite.py::test_the_state_is_known" not in inner[0]


@pytest.mark.slow
def test_a_time_limit_shows_the_stacks_of_all_children(inner: tuple[str, list[str]]) -> None:
    text = failure(inner[0], "test_a_time_limit_shows_where_replicas_stand")
    assert text.count("in stands_here") >= 2
    text = failure(inner[0], "test_a_time_limit_shows_where_programs_stand")
    assert "in program_stands_here" in text


@pytest.mark.slow
def test_a_skip_of_what_is_required_is_a_failure(inner: tuple[str, list[str]]) -> None:
    text = failure(inner[0], "test_what_is_required_is_missing")
    assert "skipped, but SPARTITO_REQUIRE says that this machine has network namespaces" in text
    assert "nothing here" in text
    assert "a skip names its kind" in failure(inner[0], "test_no_kind")


@pytest.mark.slow
def test_skips_are_counted_and_listed_by_kind(inner: tuple[str, list[str]]) -> None:
    assert "2 skipped: data 1, slurm 1" in inner[0]
    assert sorted(inner[1]) == ["data: nothing here", "slurm: no job: none ran"]


def test_an_unknown_kind_cannot_be_required() -> None:
    assert skips.required({skips.ENV: " docker,netns ,"}) == {"docker", "netns"}
    assert skips.required({}) == set()
    with pytest.raises(pytest.UsageError, match=r"names 'doker'; a test may need: .*docker, "):
        skips.required({skips.ENV: "netns,doker"})


def comes() -> None:
    pass


def stands_still() -> None:
    time.sleep(300)


def test_a_job_that_does_not_end_shows_where_each_replica_stands(replicas: Replicas) -> None:
    replicas(comes, 2)  # this module is imported there
    with pytest.raises(TimeoutError) as caught:
        replicas(stands_still, 2, timeout=5)
    for replica in ("replica 0", "replica 1"):
        part = str(caught.value).partition(f"\n{replica} (pid")[2]
        assert "in stands_still" in part.partition("(pid")[0]
    assert replicas(os.getpid, 1) != [os.getpid()]  # the pool starts anew


def test_a_replica_that_ends_is_named(replicas: Replicas) -> None:
    with pytest.raises(ReplicaError, match="replica 0: ended: exit code 3"):
        replicas(os._exit, 1, 3)


def python_warns() -> None:
    warnings.warn("of python", stacklevel=1)


def our_log_warns() -> None:
    warn("of %s", "ours")


@warns("of ")
def is_known_to_warn() -> None:
    python_warns()
    our_log_warns()


def forgets_a_file() -> None:
    open(os.devnull)  # noqa: SIM115


def leaves_a_thread_to_fail() -> None:
    thread = threading.Thread(target=json.loads, args=["{"])
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (python_warns, "UserWarning: of python"),
        (our_log_warns, "a warning that the job does not expect: of ours"),
        (forgets_a_file, "ResourceWarning: unclosed file"),
        (leaves_a_thread_to_fail, "JSONDecodeError"),
    ],
)
def test_what_a_replica_is_warned_of_fails_the_test_unless_expected(
    replicas: Replicas, job: Job, told: str
) -> None:
    with pytest.raises(ReplicaError, match=told):
        replicas(job, 1)
    assert replicas(is_known_to_warn, 1) == [None]


def test_programs_fail_where_python_warns(tmp_path: Path) -> None:
    with commands.commands_in(tmp_path) as inside:
        ended = inside.python("-c", "import warnings; warnings.warn('of python')")
    assert ended.code == 1
    assert "UserWarning: of python" in ended.err


LEAVES = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_SH)
sys.stdin.read()
"""


@pytest.mark.parametrize("own", [True, False])
def test_what_is_left_in_shared_memory_is_seen_unless_others_left_it(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    eventually = commands.eventually
    if own:  # what is of others goes, or is seen to be theirs
        monkeypatch.setattr(commands, "eventually", lambda what: eventually(what, 0.1))
    left = commands.SHARED_MEMORY / f"spartito-{secrets.token_hex(8)}"
    env = os.environ if own else {**os.environ, commands.SUITE: "another"}
    try:
        told = pytest.raises(AssertionError, match=left.name) if own else nullcontext()
        with told, commands.nothing_left() as others:
            words = [sys.executable, "-S", "-c", LEAVES, str(left)]
            with subprocess.Popen(words, env=env, stdin=subprocess.PIPE) as program:
                assert eventually(lambda: left in others if not own else left.exists(), 60)
                program.communicate(timeout=60)
            assert program.returncode == 0
    finally:
        left.unlink(missing_ok=True)


@pytest.mark.parametrize("pattern", at_night.PATTERNS)
def test_what_runs_at_night_is_there(pattern: str) -> None:
    path, _, name = pattern.removesuffix(" (slow)").partition("::")
    function = re.split(r"[*\[]", name)[0] or "test_"
    text = (Path(__file__).parent / path).read_text()
    assert re.search(rf"^(def | +){re.escape(function)}", text, re.MULTILINE)  # or imported
    one_of_each = re.sub(r"\[(.)[^]]*\]", r"\1", name)
    example = f"{path}::{one_of_each.replace('*', 'any')}"
    assert at_night.pattern_of(example, is_slow=True)


def test_what_is_too_dear_for_the_quick_tests_is_there() -> None:
    for name in costs.LIST.read_text().splitlines():
        path, _, function = costs.function_of(name).rpartition("::")
        file, *classes = path.split("::")
        text = (Path(__file__).parent / file).read_text()
        assert all(f"class {each}" in text for each in classes), name
        found = re.search(rf"^ *(def )?{re.escape(function)}\b", text, re.MULTILINE)
        assert found, name  # defined there, or imported


def test_which_tests_are_dear() -> None:
    low, high, file = costs.LIMIT / 2, costs.LIMIT, costs.ONE_OF_EACH[0]
    found = costs.dear_of(
        {
            "tests/a.py::test_cheap": low,
            "tests/a.py::test_dear[1]": high,
            "tests/a.py::test_dear[2]": high,
            "tests/a.py::test_of_forms[cheap]": low,
            "tests/a.py::test_of_forms[dear]": high,
            f"tests/{file}::test_one[dear]": 2 * high,
            f"tests/{file}::test_one[dearer]": 3 * high,
        }.items()
    )
    assert found == ["a.py::test_dear", "a.py::test_of_forms[dear]", f"{file}::test_one[dearer]"]
