"""What training steps need of the memory of a TPU's chip, from Google's compiler, without a TPU.

    python -m benchmarks.tpu_memory [--topology v5e:1x1] [SCRIPT [ARGUMENTS ...]]

The script trains on a device of torch_tpu whose library computes on the CPU, in the Python that
``scripts/tpu .venv-tpu`` makes. Its programs are then compiled for one chip of the topology in the
Python of ``scripts/libtpu .venv-libtpu``. Without a script these are trainings of our own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import interpreter
from tests.tpu import chip

ROOT = Path(__file__).parents[1]
TPU, LIBTPU = ROOT / ".venv-tpu/bin/python", ROOT / ".venv-libtpu/bin/python"
OURS = tuple((model, kind) for model in ("digits", "gpt", "gpt2") for kind in ("fp32", "bf16"))
LIMIT = 600.0
MB = 1e6


@dataclass(frozen=True, slots=True)
class Program:
    """One program: its last operation, bytes, and seconds of compilation.

    Attributes:
        name: torch's name of that operation.
        arguments: What it reads.
        output: What it gives.
        in_place: How much of the output is written over arguments.
        temporary: What it has beside both while it runs.
        code: The program itself.
        seconds: How long it was compiled.
    """

    name: str
    arguments: int
    output: int
    in_place: int
    temporary: int
    code: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Needs:
    """What a training needs of a chip, in bytes.

    Attributes:
        tensors: Those of the moment in which most of them lived, as the chip lays them out.
        programs: Each that was compiled, with what it needs beside them.
        ended: What a script said as it ended early: what only a TPU computes fails as the host
            reads the first number; the programs of the epoch are traced by then.
    """

    tensors: int
    programs: Sequence[Program]
    ended: str

    @property
    def temporary(self) -> int:
        """What the program with the most needs while it runs."""
        return max(program.temporary for program in self.programs)

    @property
    def code(self) -> int:
        """The programs themselves."""
        return sum(program.code for program in self.programs)

    @property
    def most(self) -> int:
        """All three: more is never needed at once."""
        return self.tensors + self.temporary + self.code


def needs(words: Sequence[str], topology: str, tpu: str, libtpu: str, folder: Path) -> Needs:
    """Train and compile.

    Args:
        words: A script and its arguments, or a training of ours and its precision.
        topology: Of the TPU, as ``v5e:2x2``.
        tpu: The Python of ``scripts/tpu``.
        libtpu: The Python of ``scripts/libtpu``.
        folder: An empty one.

    Raises:
        RuntimeError: The script ended before there was a program, or the compiler refused one.
    """
    trace, living, out = folder / "trace", folder / "living.json", folder / "out.json"
    here = {**chip.environment(tpu), "TORCH_TRACE": str(trace)}
    steps = _run([tpu, "-m", "benchmarks.jobs.tpu_steps", str(living), *words], here)
    if not living.exists():
        raise RuntimeError(f"{words[0]} did not train:\n{steps.stdout}")
    compiled = _run(
        [libtpu, "-m", "benchmarks.jobs.tpu_compiled", str(trace), str(living), topology, str(out)],
        # Nobody is asked what TPU this machine has.
        {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"},
    )
    if compiled.returncode:
        raise RuntimeError(f"{topology} has no program for it:\n{compiled.stdout}")
    found = json.loads(out.read_text())
    programs = [Program(**program) for program in found["programs"]]
    if not programs:
        raise RuntimeError(f"{words[0]} gave a TPU nothing to do:\n{steps.stdout}")
    return Needs(found["tensors"], programs, json.loads(living.read_text())["ended"])


def _run(
    command: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )


def main() -> None:
    """Print a line for each training."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--topology", default="v5e:1x1", help="as jax names it; one chip is used")
    options.add_argument("--tpu", type=interpreter, default=str(TPU), metavar="PYTHON")
    options.add_argument("--libtpu", type=interpreter, default=str(LIBTPU), metavar="PYTHON")
    options.add_argument("--json", action="store_true", help="print all programs too, as JSON")
    options.add_argument("script", nargs="*", help="and its arguments, after --")
    asked = options.parse_args()
    print(f"{'one chip of ' + asked.topology:24} {'tensors':>9} temporary      code        MB")
    for words in [asked.script] if asked.script else OURS:
        with tempfile.TemporaryDirectory() as folder:
            found = needs(words, asked.topology, asked.tpu, asked.libtpu, Path(folder))
        sizes = (found.tensors, found.temporary, found.code, found.most)
        seconds = sum(program.seconds for program in found.programs)
        print(
            f"{' '.join(words):24} {' '.join(f'{size / MB:9.1f}' for size in sizes)}"
            f"   {len(found.programs)} programs in {seconds:.0f} s",
            flush=True,
        )
        if found.ended:
            print(f"  it ended early: {found.ended}")
        if asked.json:
            print(json.dumps({"training": words, **asdict(found)}))


if __name__ == "__main__":
    main()
