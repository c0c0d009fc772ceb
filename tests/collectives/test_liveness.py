"""Who is lost is named by those who sign in, and a reason is read before its store goes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from spartito.collectives.membership import liveness
from spartito.collectives.membership.liveness import LivenessCheck
from spartito.collectives.membership.store import KeyValues, Membership
from spartito.collectives.membership.torch_store import OfTorch
from spartito.errors import TaskLostError

LONG = 60.0
NAMES = ["worker 0", "worker 1", "worker 2"]


def check(store: KeyValues, rank: int, size: int = 3, timeout: float = LONG) -> LivenessCheck:
    return LivenessCheck(Membership(rank, NAMES[:size], store, timeout))


def test_a_suspect_is_named_and_not_who_is_busy() -> None:
    """Neither worker 1 nor worker 2 signs in; the connection to worker 1 is closed."""
    lost = check(OfTorch(HashStore()), 0, timeout=7).lost(
        OSError("cut"), ["worker 1"], "is gone: cut"
    )
    assert str(lost).startswith("worker 1 is gone: cut\n")


def test_a_suspect_that_lives_is_not_named() -> None:
    """It left because worker 2 is lost."""
    store = OfTorch(HashStore())
    store.under("alive").set("1", b"")
    lost = check(store, 0, timeout=7).lost(OSError("cut"), ["worker 1"], "is gone: cut")
    assert str(lost).startswith("worker 2 is gone or did not come within 7 s\n")


def test_the_keeper_of_the_store_stays_until_its_reason_is_read() -> None:
    store, closed = OfTorch(HashStore()), threading.Event()
    reason = TaskLostError("worker 7 is gone", "Look.")
    with ThreadPoolExecutor() as pool:
        leaving = pool.submit(check(store, 0, size=2).leave, reason, closed.set)
        assert closed.wait(LONG)
        store.under("alive").set("1", b"")  # worker 1 signs in, and has not looked yet
        with pytest.raises(TimeoutError):
            leaving.result(0.5)
        assert str(check(store, 1, size=2).lost(OSError("cut"))) == str(reason)
        leaving.result(LONG)


def test_the_keeper_of_the_store_stays_until_a_reason_of_another_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Worker 1 leaves with its reason; worker 2 has signed in, and is slow to look."""
    monkeypatch.setattr(liveness, "GRACE", LONG)
    store, reason = OfTorch(HashStore()), TaskLostError("worker 7 is gone", "Look.")
    with ThreadPoolExecutor() as pool:
        check(store, 1).leave(reason, lambda: None)
        store.under("alive").set("2", b"")
        keeping = pool.submit(check(store, 0).lost, OSError("cut"))
        with pytest.raises(TimeoutError):
            keeping.result(0.5)
        heard = [check(store, 2).lost(OSError("cut")), keeping.result(LONG)]
        assert [str(error) for error in heard] == [str(reason)] * 2


def test_who_leaves_is_not_waited_for() -> None:
    store = OfTorch(HashStore())
    check(store, 1).leave(TaskLostError("worker 7 is gone"), lambda: None)
    assert store.under("informed").gather(["1"])
