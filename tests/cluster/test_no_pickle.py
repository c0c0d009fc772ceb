"""No pickle is read from a network or a disk: not in the source, and not when one is sent."""

from __future__ import annotations

import ast
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import spartito as sp
from spartito.checkpoint.foreign_files import opened
from spartito.cluster.store.server import Server
from spartito.errors import SpartitoError
from spartito.ps.protocol.messages import Reply
from spartito.storage import load_tensors
from spartito.wire.acceptor import Acceptor
from spartito.wire.frames import ProtocolError, Wire
from spartito.wire.secret import Key
from spartito.wire.streams import Connection
from tests.callers import LIMIT, call, read_to_end

ROOT = Path(sp.__file__).parent
KEY = Key(b"what the tasks of this job know")

OF_THE_CALLER = {
    "launch/functions/task.py",
    "launch/functions/outcome.py",
    "launch/functions/call.py",
    "launch/processes/forked_task.py",
}
"""These send a function to processes that its caller starts, in a folder that is this user's, or
run the script that the caller has named."""

UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_CALLS = {
    "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list",
    "scatter_object_list", "send_object_list", "unsafe_load", "full_load", "load_all",
}  # fmt: skip


def wrong_in(tree: ast.AST) -> Iterator[str]:
    """What of a module could run what it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from {alias.name.split(".")[0] for alias in node.names} & UNSAFE_MODULES
        elif isinstance(node, ast.ImportFrom):
            yield from {(node.module or "").split(".")[0]} & UNSAFE_MODULES
        elif isinstance(node, ast.Call):
            called, name = node.func, ast.unparse(node.func)
            last = called.attr if isinstance(called, ast.Attribute) else name
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if last in UNSAFE_CALLS or name in ("eval", "exec", "yaml.load"):
                yield name
            if name == "torch.load" and given.get("weights_only") != "True":
                yield "torch.load without weights_only"
            if given.get("allow_pickle", "False") != "False":
                yield f"{name} with allow_pickle"


def open_to_others(tree: ast.AST) -> Iterator[str]:
    """Files that a module makes and that others could read, or have put a link in place of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            text = ast.unparse(node)
            if "mktemp(" in text and "tempfile" in text:
                yield text
            if text.startswith("os.open(") and ("O_RDWR" in text or "O_CREAT" in text):
                if "devnull" in text:
                    continue
                if "O_EXCL" not in text and "O_NOFOLLOW" not in text:
                    yield text
                if "O_CREAT" in text and ast.unparse(node.args[-1]) not in ("384", "MODE"):
                    yield text


@cache
def tree_of(path: Path) -> ast.Module:
    """A source, parsed once for all tests here."""
    return ast.parse(path.read_text())


def test_files_that_are_shared_are_for_this_user_alone() -> None:
    found = {
        str(path.relative_to(ROOT)): wrong
        for path in ROOT.rglob("*.py")
        if (wrong := list(open_to_others(tree_of(path))))
    }
    assert found == {}
    assert list(open_to_others(ast.parse("os.open(x, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)")))


def test_no_source_reads_what_runs() -> None:
    found = {
        name: wrong
        for path in ROOT.rglob("*.py")
        if (name := str(path.relative_to(ROOT))) not in OF_THE_CALLER
        and (wrong := list(wrong_in(tree_of(path))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import loads", "eval(x)", "torch.load(x)",
        "torch.load(x, weights_only=False)", "dist.broadcast_object_list(x)",
        "np.load(x, allow_pickle=True)", "yaml.load(x)",
    ],
)  # fmt: skip
def test_the_look_at_the_source_finds_it(line: str) -> None:
    assert list(wrong_in(ast.parse(line)))


class Trap:
    """A pickle of this makes a folder where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@contextmanager
def accepted(enter: Callable[[Connection], None]) -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    door = Acceptor(listener, enter, key=KEY, purpose="test", name="it")
    try:
        yield listener.getsockname()[1]
    finally:
        door.close()


def test_a_pickle_at_a_port_is_refused_and_not_run(tmp_path: Path) -> None:
    """Before the handshake, in place of it, and after it: of a caller who knows the secret."""
    trap = pickle.dumps(Trap(tmp_path / "run"))
    said: list[str] = []
    done = threading.Semaphore(0)

    def hear(caller: Connection) -> None:
        try:
            Wire(caller, Reply, timeout=LIMIT).receive()
        except ProtocolError as error:
            said.append(str(error))
        caller.close()
        done.release()

    store = Server(socket.create_server(("127.0.0.1", 0)), KEY)
    try:
        with accepted(hear) as frames:
            for port in (frames, store.address[1]):
                with socket.create_connection(("127.0.0.1", port), LIMIT) as raw:
                    raw.sendall(trap + b"\n" * 300)
                    assert read_to_end(raw) == b""
            with call(frames, "test", KEY) as known:
                known.sendall(trap + b"\n" * 300)
                assert done.acquire(timeout=LIMIT)
    finally:
        store.close()
    assert len(said) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "state.json"])
def test_a_pickle_in_a_checkpoint_is_refused_and_not_run(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "model.pt":
        torch.save({"weight": torch.ones(2), "more": Trap(tmp_path / "run")}, path)
    else:
        path.write_bytes(pickle.dumps(Trap(tmp_path / "run")))
    with pytest.raises(SpartitoError):
        opened(tmp_path if name == "state.json" else path)
    if name == "model.safetensors":
        with pytest.raises(SpartitoError):
            load_tensors(path)
    assert not (tmp_path / "run").exists()
