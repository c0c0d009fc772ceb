"""What a parameter server that is started again goes on from: a whole file, or none."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from spartito.errors import TaskLostError, UserError
from spartito.failpoints import failpoint
from spartito.ps.server.counter import Counter
from spartito.ps.server.store import Store
from spartito.storage import load_tensors, replace_durably, save_tensors

ADVICE = (
    "Its part of the model is lost: start the job again; it can go on from its last checkpoint. "
    "Snapshots must outlive the server: SPARTITO_SNAPSHOT_DIR says where they lie."
)


class Snapshot:
    """The snapshot of the server ``name`` in the file ``path``; one thread at a time uses it."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name

    def counter(self) -> Counter:
        """The counter of updates, in a file beside the snapshot."""
        return Counter(self._path.with_suffix(".updates"))

    def write(self, store: Store) -> int:
        """Write what ``store`` holds; returns its version. It survives a crash of the machine.

        Raises `UserError` where there is no space for it; the one before stays then.
        """
        with store.lock:
            tensors, about = store.dump()
        tensors["about"] = torch.frombuffer(
            bytearray(json.dumps(about).encode()), dtype=torch.uint8
        )
        fresh = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            save_tensors(tensors, fresh)
            failpoint("ps.snapshot.before_replace")
            replace_durably(fresh, self._path)
            failpoint("ps.snapshot.after_replace")
        except (OSError, UserError) as error:
            with suppress(OSError):
                fresh.unlink()
            why = error if isinstance(error, UserError) else error.strerror
            raise UserError(
                f"{self._name} cannot write its snapshot {self._path}: {why}",
                "Free some space there, or name another folder by SPARTITO_SNAPSHOT_DIR.",
            ) from error
        finally:
            store.buffers.give_back(tensors)
        version: int = about["counts"][0]
        return version

    def restore(self, store: Store, job: str) -> bool:
        """Have ``store`` go on from it, if it is of ``job``; returns whether it was.

        Raises `TaskLostError` for a file that is not whole.
        """
        if not self._path.exists():
            return False
        try:
            tensors = load_tensors(self._path)
            about: dict[str, Any] = json.loads(tensors.pop("about").numpy().tobytes())
            if about["job"] != job or about["digest"] != store.shard.layout.digest:
                return False
            store.restore(tensors, about)
        except (UserError, ValueError, KeyError, TypeError, RuntimeError, struct.error) as error:
            raise TaskLostError(
                f"{self._name} was started again, and its snapshot is damaged: {error}", ADVICE
            ) from error
        return True

    def missing(self, job: str) -> TaskLostError:
        """What to say when a task of ``job`` comes that the server knows nothing of."""
        what = f"{self._path} is of another job" if self._path.exists() else f"no {self._path}"
        return TaskLostError(
            f"{self._name} was started again, and has no snapshot of job {job}: {what}", ADVICE
        )

    def remove(self) -> None:
        """The job has ended."""
        self._path.unlink(missing_ok=True)
        self._path.with_suffix(".updates").unlink(missing_ok=True)
