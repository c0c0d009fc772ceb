"""A task that is forked from a process with torch in it; `fork_server` starts this program.

The process imports what each task imports first, and forks itself whenever it is asked to. The fork
then runs the task's program as Python runs a script: the same ``__main__``, ``sys.argv``, search
path, environment, traceback and exit code.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

from spartito.system import PROC, die_with_parent
from spartito.system.texts import text_of

PRELOADED = (
    # An optimizer imports the compiler of torch, which takes as long as torch itself.
    *("torch", "torch._dynamo"),
    *("spartito.training.trainer", "spartito.collectives.rendezvous"),
)
"""What is imported before there are tasks."""

PADDING = "PADDING_OF_FORKS"
"""A variable of the server that is as long as what tasks have beyond it: see `_show`."""

FILES = 5
"""A task gets stdin, stdout, stderr, where it enlists before it does anything, and where it reads
the byte with which it begins."""

READY = b"ready\n"


def main() -> None:
    """Be the server, and in a fork of it the task; the words are a descriptor and the program."""
    number, *program = sys.argv[1:]
    sys.orig_argv[1:] = program
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, _folder_of(program))
    with socket.socket(fileno=int(number)) as asked:
        for name in PRELOADED:
            import_module(name)
        if _has_accelerator():
            return  # its driver does not survive a fork
        gc.collect()
        gc.freeze()  # no task looks through all of torch for garbage, and so copies it
        asked.sendall(READY)
        is_task = _serve(asked)
    if is_task:
        run(program)


def _folder_of(program: Sequence[str]) -> str:
    """What stands first in the search path of a program."""
    is_module = program[0] == "-m"
    return os.getcwd() if is_module else os.path.dirname(os.path.realpath(program[0]))


def _has_accelerator() -> bool:
    torch = sys.modules["torch"]
    return bool(torch.accelerator.is_available())


def _serve(asked: socket.socket) -> bool:
    """Fork a task for each request until the launcher is gone; True in a task, and only there."""
    launcher = os.getppid()
    while True:
        first, files, _, _ = socket.recv_fds(asked, 1, FILES)
        if not first:
            return False
        with asked.makefile("rb") as lines:
            env: dict[str, str] = json.loads(lines.readline())
        pid = _forked(files[-1])
        if pid == 0:
            _begin(env, files, launcher)
            return True
        for file in files:
            os.close(file)
        asked.sendall(b"%d\n" % pid)


def _forked(begins: int) -> int:
    """Fork a process whose parent is the launcher: the one between us and it ends.

    Args:
        begins: Where a byte of the launcher comes that knows of it; else it could have another
            one of this task.

    Returns:
        Its process id; less than 0 is the error for which there is none. In the process itself, 0,
        once the byte is there; it ends where none comes.
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
        return 0
    os.close(says)
    pid = int(os.read(born, 32))
    os.waitpid(between, 0)
    os.close(born)
    return pid


def _begin(env: dict[str, str], files: Sequence[int], launcher: int) -> None:
    """Become a process like one that the launcher has started itself."""
    *streams, enlists, _ = files
    os.setsid()
    with suppress(BrokenPipeError):
        os.write(enlists, b"+%d\n" % os.getpid())
    if (before := die_with_parent(launcher)) is not None:
        before()
    for number, file in enumerate(streams):
        os.dup2(file, number, inheritable=True)
    for file in files:
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    _show(env)
    # Else all tasks would draw the same. Python's own generator begins anew by itself.
    sys.modules["torch"].seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def _show(env: dict[str, str]) -> None:
    """Have ``/proc`` show our environment: by it the system's tools tell one task from another.

    It shows where the variables lay when the server began. Nothing is there that is still in use:
    ``os.environ`` has put all of them elsewhere.
    """
    start, end = map(int, text_of(PROC / "self/stat").rpartition(")")[2].split()[47:49])
    shown = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
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
