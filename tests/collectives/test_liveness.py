"""Who is lost is named by those who sign in, and a reason is read before its store goes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, PrefixStore

from spartito.collectives import liveness
from spartito.collectives.liveness import LivenessCheck
from spartito.errors import TaskLostError

LONG = 60.0
NAMES = ["worker 0", "worker 1", "worker 2"]


def test_a_suspect_is_named_and_not_who_is_busy() -> None:
    """Neither worker 1 nor worker 2 signs in; the connection to worker 1 is closed."""
    lost = LivenessCheck(HashStore(), 0, NAMES, 7).lost(
        OSError("cut"), ["worker 1"], "is gone: cut"
    )
    assert str(lost).startswith("worker 1 is gone: cut\n")


def test_a_suspect_that_lives_is_not_named() -> None:
    """It left because worker 2 is lost."""
    store = HashStore()
    PrefixStore("alive", store).set("1", "")
    lost = LivenessCheck(store, 0, NAMES, 7).lost(OSError("cut"), ["worker 1"], "is gone: cut")
    assert str(lost).startswith("worker 2 is gone or did not come within 7 s\n")


def test_the_keeper_of_the_store_stays_until_its_reason_is_read() -> None:
    store, closed = HashStore(), threading.Event()
    reason = TaskLostError("worker 7 is gone", "Look.")
    with ThreadPoolExecutor() as pool:
        leaving = pool.submit(LivenessCheck(store, 0, NAMES[:2], LONG).leave, reason, closed.set)
        assert closed.wait(LONG)
        PrefixStore("alive", store).set("1", "")  # worker 1 signs in, and has not looked yet
        with pytest.raises(TimeoutError):
            leaving.result(0.5)
        assert str(LivenessCheck(store, 1, NAMES[:2], LONG).lost(OSError("cut"))) == str(reason)
        leaving.result(LONG)


def test_the_keeper_of_the_store_stays_until_a_reason_of_another_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Worker 1 leaves with its reason; worker 2 has signed in, and is slow to look."""
    monkeypatch.setattr(liveness, "GRACE", LONG)
    store, reason = HashStore(), TaskLostError("worker 7 is gone", "Look.")
    with ThreadPoolExecutor() as pool:
        LivenessCheck(store, 1, NAMES, LONG).leave(reason, lambda: None)
        PrefixStore("alive", store).set("2", "")
        keeping = pool.submit(LivenessCheck(store, 0, NAMES, LONG).lost, OSError("cut"))
        with pytest.raises(TimeoutError):
            keeping.result(0.5)
        heard = [LivenessCheck(store, 2, NAMES, LONG).lost(OSError("cut")), keeping.result(LONG)]
        assert [str(error) for error in heard] == [str(reason)] * 2


def test_who_leaves_is_not_waited_for() -> None:
    store = HashStore()
    LivenessCheck(store, 1, NAMES, LONG).leave(TaskLostError("worker 7 is gone"), lambda: None)
    assert PrefixStore("heard", store).check(["1"])
