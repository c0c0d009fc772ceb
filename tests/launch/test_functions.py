"""``sp.launch``: functions as the tasks of a job, from a script or a test."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import spartito as sp
from spartito.launch.functions.outcome import TaskTraceback

OWN = threading.Lock()


class Loader:
    """Has a part that no other process can have."""

    def __init__(self) -> None:
        self.files = {"first": 1, "lock": threading.Lock()}


def who(greeting: str, *, mark: Any = ".") -> tuple[str, str, str]:
    """What a task knows of itself."""
    return greeting + mark, os.environ["RANK"], os.environ["SPARTITO_STRATEGY"]


def uses_a_global() -> bool:
    return OWN.locked()


def fails_in(rank: str, error: BaseException) -> None:
    """An error in one task; the others wait for long."""
    if os.environ["RANK"] == rank:
        raise error
    time.sleep(60)


def dies_in(rank: str) -> None:
    if os.environ["RANK"] == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def launches() -> Any:
    return sp.launch(who, args=("again",))


def test_the_result_of_the_chief_comes_back() -> None:
    found = sp.launch(who, strategy="mirrored", workers=2, args=("hello",), kwargs={"mark": "!"})
    assert found == ("hello!", "0", "mirrored")


def test_what_is_made_in_a_function_is_sent_and_comes_back_as_the_same_class() -> None:
    class Figures:
        def __init__(self, pid: int) -> None:
            self.pid = pid

    found = sp.launch(lambda: Figures(os.getpid()))
    assert type(found) is Figures
    assert found.pid != os.getpid()


def test_every_role_calls_the_function(tmp_path: Path) -> None:
    def sign_in() -> str:
        from spartito.cluster import resolve

        task = resolve(os.environ).task
        (tmp_path / str(task)).touch()
        return str(task)

    assert sp.launch(sign_in, workers=1, ps=1, chief=True, evaluator=True) == "chief 0"
    assert {path.name for path in tmp_path.iterdir()} == {
        "chief 0",
        "worker 0",
        "ps 0",
        "evaluator 0",
    }


def test_the_first_error_comes_back_with_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError, match="no such thing") as caught:
        sp.launch(fails_in, workers=2, args=("1", KeyError("no such thing")))
    assert isinstance(caught.value.__cause__, TaskTraceback)
    assert "in fails_in" in str(caught.value.__cause__)
    assert "worker 1, which failed with exit code 1" in caught.value.__notes__[0]
    printed = capfd.readouterr().err
    assert "worker 0 was stopped because worker 1 failed" in printed
    assert "Traceback" not in printed


def test_a_mistake_of_the_user_stays_one() -> None:
    with pytest.raises(sp.UserError, match="no such strategy") as caught:
        sp.launch(fails_in, workers=2, args=("1", sp.UserError("no such strategy")))
    assert caught.value.__cause__ is None
    assert caught.value._render_traceback_() == ["spartito: error: no such strategy"]


def test_a_task_that_is_killed_is_named() -> None:
    with pytest.raises(sp.TaskLostError, match="worker 1 was killed by SIGKILL"):
        sp.launch(dies_in, workers=2, args=("1",))


def test_a_result_that_cannot_come_back_is_named() -> None:
    with pytest.raises(
        sp.UserError, match="'lock' in 'what <lambda> returned' cannot be sent back"
    ):
        sp.launch(lambda: {"lock": threading.Lock()})


LOCAL = threading.Lock()
UNSENDABLE: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "closure": (lambda lock=LOCAL: lock, (), "'item 0' in '<lambda>'"),
    "argument": (who, (threading.Lock(),), "'argument 0' cannot be sent"),
    "deep": (who, (Loader(),), "'lock' of 'files' in 'argument 0' cannot be sent"),
    "partial": (functools.partial(who, mark=LOCAL), (), "'mark' in 'who' cannot be sent"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSENDABLE)
def test_what_cannot_be_sent_is_named_before_anything_starts(case: str) -> None:
    function, args, message = UNSENDABLE[case]
    with pytest.raises(sp.UserError, match=message) as caught:
        sp.launch(function, args=args)
    assert "_thread.lock" in str(caught.value)


def test_a_function_that_would_only_begin_is_refused() -> None:
    async def later() -> int:
        return 1

    with pytest.raises(sp.UserError, match="later is a coroutine or a generator"):
        sp.launch(cast("Callable[[], int]", later))


def test_a_lock_in_a_closure_is_named() -> None:
    def train() -> bool:
        return LOCAL.locked()

    train.__module__ = "__main__"  # as in a notebook, where globals are sent along
    with pytest.raises(sp.UserError, match=r"'LOCAL' in 'train' cannot be sent .* _thread.lock"):
        sp.launch(train)


def test_no_launch_in_a_task_or_a_thread() -> None:
    with pytest.raises(sp.UserError, match="__main__"):
        sp.launch(launches)
    found = list[BaseException]()

    def try_it() -> None:
        try:
            sp.launch(who)
        except sp.UserError as error:
            found.append(error)

    thread = threading.Thread(target=try_it, name="second")
    thread.start()
    thread.join()
    assert "main thread" in str(found[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"worker": 2}, "no option 'worker'\n  Did you mean 'workers'"),
        ({"servers": 1}, "no option 'servers'\n  Parameter servers are ps=1"),
        ({"workers": 0}, "--workers 0 is less than 1"),
        ({"strategy": "miror"}, "miror"),
        ({"out": "runs/a"}, "no option 'out'"),
        ({"chief": True}, "--chief without --ps"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sp.UserError, match=message):
        sp.launch(who, args=("hello",), **options)


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(ValueError, match="bad"):
        sp.launch(fails_in, workers=2, args=("1", ValueError("bad")))
    assert list(tmp_path.iterdir()) == []
