"""What is forked from a process with torch in it; `fork_server` starts this program.

The process imports what each task imports first, and forks itself whenever it is asked to. The fork
then runs the task's program as Python runs a script: the same ``__main__``, ``sys.argv``, search
path, environment, command line, traceback and exit code. Or it becomes another program altogether,
a launcher, with one more such process beside it, from which that one's tasks are forked.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder, SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

from spartito.names import ENV_FORK_SERVER
from spartito.system import PROC, die_with_parent
from spartito.system.texts import text_of

PRELOADED = ("torch", "spartito.training.trainer", "spartito.collectives.membership.rendezvous")
"""What is imported before there are tasks."""

PADDING = "PADDING_OF_FORKS"
"""A variable of the server that is as long as what tasks have beyond it: see `_show`."""

FILES = 5
"""A process gets stdin, stdout, stderr, where it enlists before it does anything, and where it
reads the byte with which it begins."""

READY = b"ready\n"

COMMAND_LINE, ENVIRONMENT = slice(45, 47), slice(47, 49)
"""Where ``/proc/self/stat`` says from where to where these lie, after the process's name."""


def main() -> None:
    """Be the server, and in a fork of it the task; the words are a descriptor and padding."""
    _show(COMMAND_LINE, sys.orig_argv[:-1])
    asked = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # nothing that is imported is garbage; looking takes a tenth of the time
    for name in PRELOADED:
        import_module(name)
    if _has_accelerator():
        return  # its driver does not survive a fork
    gc.enable()
    gc.collect()
    gc.freeze()  # no task looks through all of torch for garbage, and so copies it
    asked.sendall(READY)
    if (program := _serve(asked)) is not None:
        run(program)


def _first_in_path(program: Sequence[str], folder: str) -> str:
    """What stands first in the search path of a program that starts in a folder."""
    is_module = program[0] == "-m"
    return (
        folder if is_module else os.path.dirname(os.path.realpath(os.path.join(folder, program[0])))
    )


def _has_accelerator() -> bool:
    torch = sys.modules["torch"]
    return bool(torch.accelerator.is_available())


def _serve(asked: socket.socket) -> list[str] | None:
    """Fork for each request until who asks is gone.

    Returns:
        In a task, and only there, its program.
    """
    asks = os.getppid()
    with asked:
        while True:
            first, files, _, _ = socket.recv_fds(asked, 1, FILES)
            if not first:
                return None
            with asked.makefile("rb") as lines:
                request: dict[str, Any] = json.loads(lines.readline())
            program: list[str] = request["program"]
            first_in_path, is_task = _first_in_path(program, request["folder"]), not request["kind"]
            pid = 0 if is_task and _is_shadowed(first_in_path) else _forked(files[-1])
            if pid is None:
                break
            for file in files:
                os.close(file)
            asked.sendall(b"%d\n" % pid)
    os.chdir(request["folder"])
    _begin(request["env"], files, asks if is_task else None)
    if is_task:
        sys.orig_argv[1:] = program
        if not os.environ.get("PYTHONSAFEPATH"):
            sys.path.insert(0, first_in_path)
        _show(COMMAND_LINE, [sys.executable, *program])
        return program
    return _serve(_become([sys.executable, *program], request["kind"]))


def _is_shadowed(folder: str) -> bool:
    """Whether a program of this folder would find other modules there than are imported here."""
    try:
        names = {name.partition(".")[0] for name in os.listdir(folder)}
    except OSError:
        return True  # Python says it
    return any(_is_other(name, folder) for name in names & sys.modules.keys())


def _is_other(name: str, folder: str) -> bool:
    known, found = sys.modules[name].__spec__, PathFinder.find_spec(name, [folder])
    if known is None or found is None or found.origin is None:  # a mere folder comes last
        return False
    return found.origin != known.origin


def _become(words: Sequence[str], kind: str) -> socket.socket:
    """Become another program, which has a fork of this process as its own server.

    Args:
        words: Of the program.
        kind: The server's, as `fork_server.kind_of` has it.

    Returns:
        In the fork, which serves it: where that asks.
    """
    program, (asks, asked) = os.getpid(), socket.socketpair()
    if server := os.fork():
        os.environ[ENV_FORK_SERVER] = f"{program} {server} {asks.fileno()} {kind}"
        asks.set_inheritable(True)
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python
            signal.signal(ignored, signal.SIG_DFL)
        os.execv(words[0], [*words])
    asks.close()
    if (before := die_with_parent(program)) is not None:
        before()
    with open(os.devnull, "r+b") as nothing:
        for number in range(3):
            os.dup2(nothing.fileno(), number)
    asked.sendall(READY)
    return asked


def _forked(begins: int) -> int | None:
    """Fork a process whose parent is who asks: the one between us and it ends.

    Args:
        begins: Where a byte of the launcher comes that knows of it; else it could have another
            one of this task.

    Returns:
        Its process id; less than 0 is the error for which there is none. In the process itself,
        None, once the byte is there; it ends where none comes.
    """
    born, says = os.pipe()
    try:
        between = os.fork()
    except OSError as error:
        for file in (born, says):
            os.close(file)
        return -(error.errno or 1)
    if between == 0:
        try:
            if pid := os.fork():
                os.write(says, b"%d" % pid)
                os._exit(0)
        except OSError as error:
            os.write(says, b"%d" % -(error.errno or 1))
            os._exit(0)
        if not os.read(begins, 1):
            os._exit(1)
        for file in (born, says):
            os.close(file)
        return None
    os.close(says)
    pid = int(os.read(born, 32))
    os.waitpid(between, 0)
    os.close(born)
    return pid


def _begin(env: dict[str, str], files: Sequence[int], parent: int | None) -> None:
    """Become a process like one that its parent has started itself, and dies with, if it does."""
    *streams, enlists, _ = files
    os.setsid()
    with suppress(BrokenPipeError):
        os.write(enlists, b"+%d\n" % os.getpid())
    if parent is not None and (before := die_with_parent(parent)) is not None:
        before()
    for number, file in enumerate(streams):
        os.dup2(file, number, inheritable=True)
    for file in files:
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    _show(ENVIRONMENT, [f"{name}={value}" for name, value in env.items()])
    tempfile.tempdir = None  # asked again, with our variables
    # Else all tasks would draw the same. Python's own generator begins anew by itself.
    sys.modules["torch"].seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def _show(where: slice, words: Sequence[str]) -> None:
    """Have ``/proc`` show our own words: by them the system's tools tell one task from another.

    It shows what lies where those of the server were when it began. Nothing there is still in use:
    Python has put all of it elsewhere. What does not fit is not shown.
    """
    start, end = map(int, text_of(PROC / "self/stat").rpartition(")")[2].split()[where])
    shown = b"".join(os.fsencode(word) + b"\0" for word in words)
    if len(shown) <= end - start:
        ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def run(program: Sequence[str]) -> None:
    """Run a program as Python does.

    Args:
        program: A script or ``-m`` and a module, and its arguments.

    Raises:
        SystemExit: It ended so, or by an exception, which has been shown.
    """
    try:
        code, main = _main_of(program)
        exec(code, main.__dict__)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and _is_inner(frames.tb_frame.f_globals):
            frames = frames.tb_next
        error.__traceback__ = frames
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
        sys.excepthook(type(error), error, frames)
        sys.exit(1)


def _is_inner(names: Mapping[str, Any]) -> bool:
    """Whether a frame with these globals is one by which a program is found and begins."""
    return names is globals() or str(names.get("__name__")).partition(".")[0] == "importlib"


def _main_of(program: Sequence[str]) -> tuple[CodeType, ModuleType]:
    """The code of a program, and the module in which it runs; sets ``sys.argv``.

    It is the module that is there: what was imported may know it already, as ``dill`` does.
    """
    main = sys.modules["__main__"]
    loader: Any
    if program[0] == "-m":
        spec = find_spec(program[1])
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{program[1]}.__main__")
        if spec is None or spec.loader is None or spec.origin is None:
            raise ImportError(f"No module named {program[1]}")
        loader, path = spec.loader, spec.origin
        code: CodeType = loader.get_code(spec.name)
        main.__spec__, main.__package__, words = spec, spec.parent, program[2:]
        cached = spec.cached
    else:
        path, words, cached = os.path.abspath(program[0]), program[1:], None
        loader = SourceFileLoader("__main__", path)
        code = loader.source_to_code(loader.get_data(path), path)
    main.__file__, main.__loader__ = path, loader
    main.__dict__.update(__cached__=cached)
    sys.argv[:] = [path if program[0] == "-m" else program[0], *words]
    return code, main
