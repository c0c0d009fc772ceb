"""Kills rank 1 in the middle of training; rank 0 prints the seconds until its error names it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

STEPS = 20


def main() -> None:
    """``killed BACKEND FILE``: rank 1 trains in a child, as its own end is not a failure here."""
    backend, file = sys.argv[1], Path(sys.argv[2])
    if os.environ["RANK"] != "0" and os.fork() != 0:
        os.wait()
        return
    seconds, text = train(backend, file)
    print(json.dumps({"seconds": seconds, "error": text.splitlines()[0]}), flush=True)
    os._exit(0)  # gloo's threads may wait for the dead


def train(backend: str, file: Path) -> tuple[float, str]:
    """Reduce until it fails; rank 1 writes down when it ends itself."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend)
    tensor = torch.zeros(1000)
    for step in range(2 * STEPS):
        if dist.get_rank() == 1 and step == STEPS:
            file.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(tensor)
        except Exception as error:
            return time.monotonic() - float(file.read_text()), str(error)
    raise AssertionError("rank 1 lives")


if __name__ == "__main__":
    main()
