"""A batch file as bash runs it, where ``srun`` and ``scontrol`` only tell what they were given.

With ``CODES`` in the environment ``srun`` has tasks that end so, one after the other.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

COMMANDS = """
srun() {
    printf '%s\\0' "$@" >> srun.words; env -0 > srun.env
    [ -z "${SPARTITO_SECRET_FILE-}" ] || cp -p "$SPARTITO_SECRET_FILE" srun.secret
    while [ $# -gt 0 ] && [ "$1" != /bin/bash ]; do shift; done
    for one in ${CODES-}; do /bin/bash -c "$3" task sh -c "exit $one"; done
    return "$CODE"
}
scontrol() { echo "scontrol $*"; }
. ./job.sbatch
"""


def options(text: str) -> dict[str, str]:
    """What a batch file asks of Slurm."""
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", text, re.MULTILINE))


def run(text: str, code: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
    """The batch script in the present folder, whose ``srun`` ends with ``code``."""
    for old in Path().glob("srun.*"):
        old.unlink()
    Path("job.sbatch").write_text(text)
    env = {"SLURM_JOB_ID": "7", "PATH": "/usr/bin:/bin", "CODE": str(code)} | more
    return subprocess.run(["bash", "-c", COMMANDS], env=env, capture_output=True, text=True)


def played(text: str, code: int = 0, **more: str) -> tuple[list[str], dict[str, str], int]:
    """What ``srun`` would be told, in words and by the environment, and the script's exit code."""
    ended = run(text, code, **more)
    assert ended.stderr == "", ended.stderr
    words = Path("srun.words").read_text().split("\0")[:-1]
    if "/bin/bash" in words:  # the shell that says how each of several tasks ended
        begin = words.index("/bin/bash")
        assert (words[begin + 1], words[begin + 3]) == ("-c", "task")
        del words[begin : begin + 4]
    pairs = (entry.partition("=") for entry in Path("srun.env").read_text().split("\0") if entry)
    return words, {name: value for name, _, value in pairs}, ended.returncode
