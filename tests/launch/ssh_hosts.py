"""Machines that ssh reaches: network namespaces, each with a real sshd, keys of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from spartito.launch.lines.network import Machine, network
from tests.commands import LEAN, SPARTITO, Commands, Program, eventually
from tests.skips import refused

SSHD = "/usr/sbin/sshd"
SEPARATION = Path("/run/sshd")
"""The folder that sshd wants to be there."""

SERVER = """
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
AcceptEnv NOTHING
SetEnv PYTHONPATH={lean} HOME={folder}/home
"""
"""A home of its own: what this machine's shells do as they start is not part of a test."""
CLIENT = """
Host *
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    User root
Host alias
    HostName node2
Host nobodys-key
    HostName 10.77.0.2
    HostKeyAlias node1
    IdentityFile none
    PubkeyAuthentication no
Host unknown-key
    HostName 10.77.0.3
    HostKeyAlias never-seen
Host changed-key
    HostName node1
    HostKeyAlias changed
Host no-server
    HostName node1
    Port 23
Host loopback
    HostName 127.0.0.1
Host gone
    HostName 10.77.0.99
    ConnectTimeout 1
"""


@dataclass(frozen=True)
class Site:
    """``near``, where the commands are typed, and ``node1`` and ``node2``; keys in ``folder``."""

    near: Machine
    one: Machine
    two: Machine
    folder: Path

    @property
    def ssh(self) -> str:
        """What ``--ssh`` says."""
        return f"ssh -F {self.folder}/config"

    def start(
        self, commands: Commands, *words: str | Path, env: Mapping[str, str] | None = None
    ) -> Program:
        """Type ``spartito WORDS`` on ``near``."""
        command, *rest = words
        ours = (*self.near.enters, *SPARTITO, command, "--ssh", self.ssh)
        return commands.start(*ours, *rest, env=env)


def why_not() -> str:
    """Why ssh cannot reach any machine here, "" where it can."""
    installed = shutil.which("ssh") is not None and Path(SSHD).exists()
    missing = "" if installed else "there is no OpenSSH client and server here"
    return missing or refused(os.environ).get("ssh", "")


@contextmanager
def machines(folder: Path) -> Iterator[Site]:
    """The machines, until the end of the block; files are written into ``folder``.

    Raises `NoNamespacesError` where there cannot be any.
    """
    for name in ("key", "host_key", "other_key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True, timeout=30)
    shutil.copy(folder / "key.pub", folder / "authorized_keys")
    own, other = ((folder / f"{name}.pub").read_text() for name in ("host_key", "other_key"))
    (folder / "known_hosts").write_text(f"node1,node2,10.77.* {own}changed {other}")
    (folder / "config").write_text(CLIENT.format(folder=folder))
    (folder / "home").mkdir()
    (folder / "sshd_config").write_text(SERVER.format(folder=folder, lean=LEAN))
    made = not SEPARATION.exists()
    SEPARATION.mkdir(exist_ok=True)
    with ExitStack() as stack:
        near, one, two = stack.enter_context(network("near", "node1", "node2"))
        for host in (one, two):
            stack.enter_context(server(host, folder))
        yield Site(near, one, two, folder)
    if made:
        SEPARATION.rmdir()


@contextmanager
def server(host: Machine, folder: Path) -> Iterator[None]:
    """An sshd on ``host`` that listens when the block begins."""
    log = folder / f"{host.name}.log"
    words = [*host.enters, SSHD, "-D", "-E", str(log), "-f", f"{folder}/sshd_config"]
    with subprocess.Popen(words, start_new_session=True) as sshd:
        try:
            assert eventually(lambda: log.exists() and "Server listening" in log.read_text())
            yield
        finally:
            os.killpg(sshd.pid, signal.SIGKILL)  # those too that serve a connection
