"""A process that has imported what takes long, and runs pytest in forks of itself.

It knows nothing of the package or its tests: each fork imports these, with the mutant in them.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module

import pytest

HEAVY = (
    *("torch", "torch._dynamo", "torch.distributed.tensor", "torch.utils.tensorboard", "numpy"),
    *("matplotlib.figure", "matplotlib.backends.backend_svg", "matplotlib.ticker"),
    *("torchmetrics", "jinja2", "rich.progress", "typer", "msgspec", "safetensors.torch", "yaml"),
    *("cryptography.fernet", "psutil", "fsspec", "PIL.Image", "pyarrow.parquet", "greenlet"),
)


def main() -> None:
    """Serve: a line of JSON has the words for pytest, and the file for what it prints.

    The reply is the process, and later its exit code.
    """
    for name in HEAVY:
        import_module(name)
    print("ready", flush=True)
    for line in sys.stdin:
        words, output = json.loads(line)
        if not (pid := os.fork()):
            _run(words, output)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(words: list[str], output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    silent = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, silent), (1, descriptor), (2, descriptor)):
        os.dup2(source, target)
    sys.argv[:] = ["pytest", *words]
    code = 3
    try:
        code = int(pytest.main(words))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
