"""The job's store: many clients see one dictionary, and each call ends."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spartito.cluster.store.client import (
    FencedError,
    StoreError,
    StoreGoneError,
    ValueTimeoutError,
)
from spartito.cluster.store.protocol import (
    PURPOSE,
    BrokenRequestError,
    Delete,
    Gather,
    Reply,
    Set,
    request_of,
)
from spartito.cluster.store.values import Values
from spartito.errors import SpartitoError
from spartito.wire import acceptor
from spartito.wire.handshake import HELLO, MAGIC, VERSION, OtherProgramError, SecretError
from spartito.wire.limits import LONG_HEADER
from spartito.wire.secret import Key
from tests.callers import call
from tests.cluster.stores import KEY, LIMIT, TLS, client, is_closed, served
from tests.launch.supervised import stands_still, wait_until
from tests.processes import context

KEYS = st.sampled_from(["a", "b", "old/a", "old/b"])
CALLS = st.one_of(
    st.tuples(st.just("set"), KEYS, st.binary(max_size=3)),
    st.tuples(st.just("add"), st.sampled_from(["n", "old/n"]), st.integers(-3, 3)),
    st.tuples(st.just("swap"), KEYS, st.none() | st.binary(max_size=1), st.binary(max_size=1)),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("gather"), st.lists(KEYS, max_size=3)),
    st.tuples(st.just("keys"), st.sampled_from(["", "old/"])),
    st.tuples(st.just("retire"), st.just("old")),
)


class Model:
    """What a store must do, by a dictionary."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.retired = False

    def fenced(self, *keys: str) -> None:
        """Raise where one of them is of a time that is over."""
        if self.retired and any(key.startswith("old/") for key in keys):
            raise FencedError("")

    def set(self, key: str, value: bytes) -> None:
        self.fenced(key)
        self.values[key] = value

    def add(self, key: str, amount: int) -> int:
        self.fenced(key)
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])

    def swap(self, key: str, expected: bytes | None, new: bytes) -> bytes | None:
        self.fenced(key)
        if self.values.get(key) == expected:
            self.values[key] = new
        return self.values.get(key)

    def delete(self, key: str) -> bool:
        self.fenced(key)
        return self.values.pop(key, None) is not None

    def gather(self, keys: list[str]) -> dict[str, bytes]:
        self.fenced(*keys)
        return {key: self.values[key] for key in keys if key in self.values}

    def keys(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in self.values.items() if key.startswith(prefix)}

    def retire(self, prefix: str) -> None:
        self.retired = True
        self.values = {k: v for k, v in self.values.items() if not k.startswith(prefix + "/")}


def outcome(of: object, name: str, *arguments: object) -> object:
    """What a call returns, or how it fails."""
    try:
        return getattr(of, name)(*arguments)
    except StoreError as error:
        return type(error)


@pytest.mark.parametrize("key", [KEY, TLS])
@settings(max_examples=30, deadline=None)
@given(calls=st.lists(st.tuples(st.integers(0, 2), CALLS), max_size=25))
def test_several_clients_see_one_dictionary(
    key: Key, calls: list[tuple[int, tuple[str, ...]]]
) -> None:
    with served(key) as server:
        clients, model = [client(server, key).under("job") for _ in range(3)], Model()
        for who, (name, *arguments) in calls:
            assert outcome(clients[who], name, *arguments) == outcome(model, name, *arguments)
        for each in clients:
            each.close()


def test_no_count_is_lost_and_one_of_all_wins() -> None:
    with served() as server:
        each = client(server)

        def work(number: int) -> bool:
            for _ in range(50):
                each.add("count", 1)
            return each.swap("first", None, str(number).encode()) == str(number).encode()

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(work, range(8))) == 1
        assert each.get("count") == b"400"


def test_who_waits_gets_what_comes_and_what_is_there_at_the_end() -> None:
    with served() as server, ThreadPoolExecutor(1) as pool:
        one, other = client(server), client(server)
        waiting = pool.submit(one.gather, ["a", "b"], LIMIT)
        other.set("a", b"1")
        other.set("b", b"2")
        assert waiting.result(LIMIT) == {"a": b"1", "b": b"2"}
        assert one.gather(["a", "c"], 0.01) == {"a": b"1"}
        with pytest.raises(ValueTimeoutError, match="nobody has set 'c' within"):
            one.get("c", 0.01)


def test_who_waits_below_a_prefix_that_is_over_is_told() -> None:
    with served() as server, ThreadPoolExecutor(1) as pool:
        one, other = client(server), client(server)
        waiting = pool.submit(one.under("0").get, "never", LIMIT)
        while not other.keys("0/here"):  # the wait is at the server before the end of its prefix
            one.under("0").set("here", b"")
        other.retire("0")
        with pytest.raises(FencedError):
            waiting.result(LIMIT)
        with pytest.raises(FencedError):
            other.under("0").set("late", b"")
        other.under("1").set("new", b"")
        assert list(other.keys()) == ["1/new"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(KEYS, st.tuples(KEYS, st.booleans())), max_size=20))
def test_a_wait_ends_when_all_of_its_keys_are_there_at_once(events: list[object]) -> None:
    values: Values[str] = Values()
    there: set[str] = set()
    assert values.apply(Gather(("a", "b"), 1.0), "who") is None
    done = False
    for event in events:
        key, is_set = event if isinstance(event, tuple) else (event, True)
        values.apply(Set(key, b"") if is_set else Delete(key), "other")
        (there.add if is_set else there.discard)(key)
        ready = values.ready()
        assert bool(ready) == (not done and {"a", "b"} <= there)
        done = done or bool(ready)
    assert bool(values.give_up("who").found) == (not done and bool(there & {"a", "b"}))


def test_a_client_that_is_killed_harms_nobody() -> None:
    with served() as server:
        ours, theirs = context.Pipe()
        process = context.Process(target=wait_for_ever, args=(server.address, theirs), daemon=True)
        process.start()
        assert ours.poll(LIMIT)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        each = client(server)
        each.set("never", b"")
        assert each.get("never") == b""


def wait_for_ever(address: tuple[str, int], pipe: Pipe) -> None:
    """Wait for a value that nobody sets."""
    each = client(address)
    each.set("here", b"")
    pipe.send(None)
    each.get("never", LIMIT)


def keep(pipe: Pipe) -> None:
    """Keep a store until the end."""
    with served() as server:
        pipe.send(server.address)
        pipe.recv()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_is_frozen_or_gone_is_an_error_in_time(
    number: signal.Signals,
) -> None:
    ours, theirs = context.Pipe()
    process = context.Process(target=keep, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        each = client(ours.recv(), limit=2.0)
        each.set("a", b"")
        os.kill(process.pid, number)
        if number == signal.SIGSTOP:  # it may be on its way to do something
            wait_until(lambda: stands_still(process.pid))
        what = "did not reply within 2 s" if number == signal.SIGSTOP else "is gone"
        with pytest.raises(StoreGoneError, match=what):
            each.get("a", 0.0)
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("key", [KEY, TLS])
def test_another_secret_is_refused_on_both_sides(
    key: Key, caplog: pytest.LogCaptureFixture
) -> None:
    other = replace(key, secret=b"another")
    with served(key) as server:
        with pytest.raises(SecretError, match="does not know the secret of this task"):
            client(server, other).set("a", b"")
        assert client(server, key).keys() == {}
        assert "it does not know the job's secret" in caplog.text


def test_another_program_is_no_store() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def reply() -> None:
            caller, _ = listener.accept()
            with caller:
                caller.sendall(b"HTTP/1.1 400 Bad Request")

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(OtherProgramError, match="another program replies there"):
            client(listener.getsockname()).keys()
        thread.join()


def test_what_is_no_request_ends_its_connection_alone() -> None:
    with served() as server:
        with call(server.address[1], PURPOSE, KEY) as caller:
            caller.sendall(b"no frame" * 100)
            assert is_closed(caller)
        assert client(server).keys() == {}


@pytest.mark.parametrize(
    "words",
    [b"GET / HTTP/1.1\r\n\r\n", MAGIC + bytes(32), HELLO.pack(MAGIC, VERSION, b"") + bytes(64)],
)
def test_who_says_something_else_first_is_disconnected(words: bytes) -> None:
    with served() as server, socket.create_connection(server.address, LIMIT) as caller:
        caller.sendall(words)
        assert is_closed(caller)
        assert client(server).keys() == {}


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_no_body_but_a_request_is_obeyed(body: bytes) -> None:
    values: Values[str] = Values()
    with suppress(BrokenRequestError):
        values.apply(request_of(body), "who")


@pytest.mark.parametrize("key", [KEY, TLS])
def test_who_says_nothing_keeps_nobody_out(key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "MOST_UNKNOWN", 4)
    with served(key) as server:
        silent = [socket.create_connection(server.address, LIMIT) for _ in range(5)]
        assert is_closed(silent[0])
        client(server, key).set("a", b"")
        for each in silent:
            each.close()


def test_who_says_nothing_is_disconnected_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "GREETING_SECONDS", 0.05)
    with served() as server, socket.create_connection(server.address, LIMIT) as silent:
        assert is_closed(silent)


def test_values_are_limited() -> None:
    with served() as server:
        each = client(server)
        with pytest.raises(SpartitoError, match="takes 4,194,304 at most"):
            each.set("a", bytes(LONG_HEADER))
        each.set("a", b"text")
        with pytest.raises(StoreError, match="is no number"):
            each.add("a", 1)
        each.set("b", bytes(LONG_HEADER - 100))
        each.set("c", bytes(LONG_HEADER - 100))
        with pytest.raises(StoreError, match="a reply of"):
            each.keys()
        assert each.get("a") == b"text"
    small: Values[str] = Values(most=100)
    assert small.apply(Set("a", bytes(30)), "who") == Reply()
    assert small.apply(Set("b", bytes(30)), "who") == Reply(refused="full")
    assert small.apply(Set("a", bytes(36)), "who") is not None


def test_a_store_in_a_fork_stays_the_parents() -> None:
    with served() as server:
        each = client(server)
        each.set("a", b"")
        child = os.fork()
        if not child:
            server.close()
            os._exit(0 if outcome(each, "keys") is StoreGoneError else 1)
        assert os.waitpid(child, 0)[1] == 0
        start = time.monotonic()
        assert each.get("a") == b""
        assert time.monotonic() - start < LIMIT
