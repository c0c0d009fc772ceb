"""Nothing outlives the supervisor, not even when it is killed with SIGKILL."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Callable, Iterable
from contextlib import suppress

from spartito.names import ENV_JOB
from spartito.system import KILL_MARKED

MARK = ENV_JOB
"""The environment variable by which those are found that left their process group."""

# Keeps the newest list of process groups, and who has enlisted since; when the pipe closes, the
# supervisor is gone.
WATCH = rf"""
while read -r line; do
    case $line in +*) groups="$groups ${{line#+}}";; *) groups=$line;; esac
done
for g in $groups; do kill -s KILL -- "-$g"; done
mark={MARK}=$1
{KILL_MARKED}
shift
[ $# = 0 ] || rm -rf -- "$@"
"""


class Reaper:
    """A shell of a few kilobytes that ends the listed process groups when we are gone.

    The kernel's death signal (`spartito.system.die_with_parent`), where there is one, reaches only
    a child itself; this reaches its children too. Where ``mark`` is in their environment, it
    reaches those that have left the group as well, as daemons do. ``private`` are folders that it
    removes then.
    """

    def __init__(self, *private: str | None) -> None:
        token = secrets.token_hex(8)
        self.mark = {MARK: token}
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", WATCH, "reaper", token, *filter(None, private)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", os.defpath)},  # nothing that others should not see
            start_new_session=True,
            bufsize=0,
        )

    @property
    def pid(self) -> int:
        """The process id of the shell."""
        return self._shell.pid

    @property
    def pipe(self) -> int:
        """Where a process enlists, with a line ``+GROUP``."""
        assert self._shell.stdin is not None
        return self._shell.stdin.fileno()

    def watch(self, groups: Iterable[int]) -> None:
        """From now on ``groups`` and no others end with us."""
        assert self._shell.stdin is not None
        try:
            self._shell.stdin.write((" ".join(map(str, groups)) + "\n").encode())
        except BrokenPipeError:
            return  # someone killed the reaper; the kernel's death signal may be left

    def enlist(self) -> Callable[[], None]:
        """What a child runs before its program, in a group of its own, to be watched from then on.

        Until `watch` says it we may be killed, and a program that has just begun shows no mark yet.
        """
        pipe = self.pipe

        def enlist() -> None:
            with suppress(BrokenPipeError):
                os.write(pipe, b"+%d\n" % os.getpid())

        return enlist

    def close(self) -> None:
        """Dismiss the reaper; whatever is on its list or has its mark ends."""
        self._shell.communicate()
