"""The secret of a job: where it is read, and what is refused."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from spartito.cluster import resolve
from spartito.cluster.endpoints import job_key, warn_if_open
from spartito.errors import UserError
from spartito.wire.secret import (
    Key,
    check_secrets,
    fingerprint,
    new_secret,
    read_secret,
    with_secret,
)

GIVEN = "known to the tasks alone"


def cluster(host: str, index: int = 0) -> dict[str, str]:
    tasks = {"worker": [f"{host}:29500", f"{host}:29501"]}
    task = {"type": "worker", "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": tasks, "task": task})}


def test_a_launcher_makes_one_unless_it_is_given(tmp_path: Path) -> None:
    made = with_secret({"PATH": "/bin"})
    assert re.fullmatch("[0-9a-f]{64}", made["SPARTITO_SECRET"])
    assert new_secret() != new_secret()
    file = tmp_path / "secret"
    file.write_text(f"{GIVEN}\n")
    for env in ({"SPARTITO_SECRET": GIVEN}, {"SPARTITO_SECRET_FILE": str(file)}):
        assert with_secret(env) == env
        assert read_secret(env) == GIVEN
    assert read_secret({}) == ""


@pytest.mark.parametrize(
    ("env", "content", "what"),
    [
        ({"SPARTITO_SECRET": "guess me"}, None, "SPARTITO_SECRET has 8 characters, at least 16"),
        ({}, None, "cannot be read: .*No such file"),
        ({}, b"", "is empty"),
        ({}, b"\xff" * 32, "cannot be read"),
        ({}, b"first line of it\nsecond line of it", "has more than one line"),
    ],
)
def test_what_is_no_secret(
    env: dict[str, str], content: bytes | None, what: str, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=what):
        read_secret(env or {"SPARTITO_SECRET_FILE": str(file)})


@pytest.mark.parametrize(
    ("host", "index", "env", "warns"),
    [
        ("10.0.0.1", 0, {}, True),
        ("10.0.0.1", 1, {}, False),  # one task says it for all
        ("127.0.0.1", 0, {}, False),
        ("10.0.0.1", 0, {"SPARTITO_SECRET": GIVEN}, False),
    ],
)
def test_a_job_that_others_could_join_is_told_so(
    host: str, index: int, env: dict[str, str], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    variables = cluster(host, index) | env
    with caplog.at_level(logging.WARNING):
        warn_if_open(resolve(variables), variables)
    key = job_key(resolve(variables), variables)
    secret = env.get("SPARTITO_SECRET", "").encode()
    assert key == Key(secret, encrypts=bool(secret))  # to others than the loopback
    assert GIVEN not in repr(key)
    assert ("this job has no secret, so whoever reaches 10.0.0.1" in caplog.text) == warns


def test_secrets_that_differ_are_named_by_task() -> None:
    a, b = fingerprint("a" * 16), fingerprint("b" * 16)
    check_secrets({"worker 0": a, "worker 1": a})
    check_secrets({"worker 0": "", "worker 1": fingerprint("")})
    with pytest.raises(UserError, match="worker 0 and worker 2 one, worker 1 one"):
        check_secrets({"worker 0": a, "worker 1": b, "worker 2": a})
    with pytest.raises(UserError, match="worker 0 one, worker 1 none"):
        check_secrets({"worker 0": a, "worker 1": ""})
