"""Other machines by the system's own ssh: how it is called, and what can be wrong with it."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO

from spartito.errors import UserError
from spartito.launch.target import quoted
from spartito.system import die_with_parent

OPTIONS = (
    *("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3"),
    *("ControlPath=none", "ClearAllForwardings=yes", "RemoteCommand=none", "LogLevel=ERROR"),
)
"""Nobody is asked for a password, a dead connection is noticed within 15 s, and each task has a
connection of its own. What the user's ``--ssh`` says counts first."""

CHECK_SECONDS = 30.0
"""How long all machines together may take to reply to the first question."""

MOST = 100_000
"""Bytes of a command; Linux takes 131,072 in one word."""

NO_FOLDER, NO_PYTHON = 81, 82
"""Exit codes of the shell on the other machine, before Python starts there."""

REFUSALS = {
    "could not resolve hostname": (
        "its name is not known here",
        "Correct the name, or give it a HostName in ssh's config.",
    ),
    "connection refused": (
        "nobody listens on its ssh port",
        "Start sshd there; a port other than 22 belongs into ssh's config, or --ssh 'ssh -p 2222'.",
    ),
    "identification has changed": (
        "it shows another host key than before",
        "If that is right, forget the old one: ssh-keygen -R {host}",
    ),
    "host key verification failed": (
        "its host key is not known here",
        "Look at it once and accept it: {ssh} {host} true",
    ),
    "permission denied": (
        "it does not let us in without a password",
        "Give it your key: ssh-copy-id {host}. Then '{ssh} {host} true' must not ask anything.",
    ),
    "timed out": ("it does not reply", "Is it on, and does a firewall let port 22 through?"),
    "no route to host": ("no route to it", "Is it on, and is the address right?"),
    "network is unreachable": ("no route to it", "Is the address right?"),
}
"""What ssh says when it comes to nothing, what that means, and what to do."""


@dataclass(frozen=True, slots=True)
class Ssh:
    """How ssh is called, and where on each machine: a folder and a Python."""

    words: tuple[str, ...]
    folder: str
    python: str

    def command(self, host: str, script: str) -> list[str]:
        """The words that run ``script``, of a POSIX shell, on ``host``."""
        options = [word for option in OPTIONS for word in ("-o", option)]
        return [*self.words, "-T", *options, "--", host, f"exec /bin/sh -c {shlex.quote(script)}"]

    def python_command(self, host: str, argv: Sequence[str]) -> list[str]:
        """The words that run ``argv``, which begins with a Python, in our folder on ``host``.

        Raises `UserError` where they are too long for one command.
        """
        python = quoted(argv[0])
        lines = (
            f"cd {quoted(self.folder)} 2>/dev/null || exit {NO_FOLDER}",
            f"command -v {python} >/dev/null || exit {NO_PYTHON}",
            f"exec {python} {shlex.join(argv[1:])}",
        )
        words = self.command(host, "; ".join(lines))
        if (size := len(words[-1].encode())) > MOST:
            raise UserError(
                f"the command for {host} has {size} bytes, more than {MOST}",
                "Give long arguments in a file that the script reads.",
            )
        return words


@dataclass(frozen=True, slots=True)
class Reply:
    """How a command on another machine ended, and what it printed; code None: it did not end."""

    code: int | None
    out: str = ""
    err: str = ""


def parse_ssh(text: str) -> tuple[str, ...]:
    """The words of ``--ssh``; `UserError` where they are none."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"--ssh {text!r} cannot be read: {error}") from error
    if not words:
        raise UserError("--ssh is empty", "Write it as 'ssh -F file -p 2222'.")
    return words


def address_of(words: Sequence[str], name: str) -> str:
    """Where ssh's config says that ``name`` is: its HostName; `UserError` if ssh cannot tell."""
    try:
        got = subprocess.run(
            [*words, "-G", "--", name], capture_output=True, text=True, timeout=CHECK_SECONDS
        )
    except OSError as error:
        raise UserError(
            f"{words[0]} cannot be started: {error.strerror}",
            "Install OpenSSH's client, or name another command with --ssh.",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"'{shlex.join(words)} -G {name}' did not end") from error
    if got.returncode:
        raise UserError(
            f"{shlex.join(words)}: {got.stderr.strip()}", "Correct --ssh or its config."
        )
    pairs = (line.partition(" ") for line in got.stdout.splitlines())
    return next((value for key, _, value in pairs if key == "hostname"), name.rpartition("@")[2])


def ask_all(commands: Mapping[str, Sequence[str]], limit: float = CHECK_SECONDS) -> list[Reply]:
    """Run all ``commands`` (by machine) at once; their replies in order, within ``limit`` s."""
    end = time.monotonic() + limit
    before = die_with_parent()
    with ExitStack() as started:
        asked = []
        for words in commands.values():
            # Files, not pipes: nobody has to read one machine while we wait for another.
            out, err = (started.enter_context(TemporaryFile()) for _ in range(2))
            process = subprocess.Popen(
                list(words), stdin=subprocess.DEVNULL, stdout=out, stderr=err, preexec_fn=before
            )
            started.enter_context(process)
            started.callback(process.kill)  # runs before the wait of the line above
            asked.append((process, out, err))
        return [_reply(*one, end - time.monotonic()) for one in asked]


def refusal(host: str, ssh: Ssh, reply: Reply) -> tuple[str, str] | None:
    """What is wrong with ``host`` by its ``reply``, and what to do; None if Python ran there."""
    typed = shlex.join(ssh.words)
    last = next((line for line in reversed(reply.err.splitlines()) if line.strip()), "")
    if reply.code is None:
        return f"{host} did not reply within {CHECK_SECONDS:g} s", f"Try it: {typed} {host} true"
    if reply.code == NO_FOLDER:
        return f"{host} has no folder {ssh.folder}", "Copy it there, or name one by --remote-dir."
    if reply.code == NO_PYTHON:
        return (
            f"{host} has no Python at {ssh.python}",
            "Install Spartito there in the same folder, or name a Python by --remote-python.",
        )
    if "No module named" in last and "spartito" in last:
        return (
            f"{ssh.python} on {host} has no Spartito, or another version: {last}",
            "Install the same version there.",
        )
    if reply.code == 0:
        return None
    text = reply.err.lower()
    for sign, (what, do) in REFUSALS.items():
        if sign in text:
            return f"ssh to {host}: {what} ({last.strip()})", do.format(host=host, ssh=typed)
    return f"ssh to {host} failed with exit code {reply.code}: {last.strip()}", ""


def _reply(process: subprocess.Popen[bytes], out: IO[bytes], err: IO[bytes], limit: float) -> Reply:
    try:
        code = process.wait(max(0.0, limit))
    except subprocess.TimeoutExpired:
        return Reply(None)
    printed = []
    for file in (out, err):
        file.seek(0)
        printed.append(file.read().decode(errors="replace"))
    return Reply(code, *printed)
