"""A step hook: training waits before some steps, while the test does something to the job.

``SPARTITO_STEP_HOOK=held:attach`` with ``SPARTITO_TEST_HELD=FOLDER:STEP,STEP``: who comes to such a
step makes the file ``FOLDER/STEP-worker-0`` and waits for ``FOLDER/STEP``, which also a task makes
that is told to end meanwhile.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def attach(trainer: Any) -> None:
    """Have the steps of ``trainer`` wait as the environment says."""
    if not isinstance(getattr(trainer.strategy.engine.step, "__self__", None), Held):
        trainer.strategy.engine.step = Held(trainer).step


class Held:
    """The ``step`` of a strategy, before which its task may wait."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._step = trainer, trainer.strategy.engine.step
        folder, _, steps = os.environ["SPARTITO_TEST_HELD"].rpartition(":")
        self._folder, self._steps = Path(folder), [int(step) for step in steps.split(",")]
        self._folder.mkdir(exist_ok=True)
        with suppress(PermissionError):  # another task made it
            self._folder.chmod(0o777)
        task = trainer.coordination.cluster.task
        self._name = f"{task.type}-{task.index}"

    def step(self, batch: Any, loss: Any, *, stop: bool = False) -> Any:
        """As `Strategy.step`."""
        for step in self._steps:
            if self._trainer.step >= step and not (self._folder / f"{step}").exists():
                self._wait(step)
        return self._step(batch, loss, stop=stop)

    def _wait(self, step: int) -> None:
        go, before = self._folder / f"{step}", signal.getsignal(signal.SIGTERM)

        def told(number: int, frame: Any) -> None:
            go.touch()
            if callable(before):
                before(number, frame)

        signal.signal(signal.SIGTERM, told)
        (self._folder / f"{step}-{self._name}").touch()
        while not go.exists():
            time.sleep(0.02)
        signal.signal(signal.SIGTERM, before)
