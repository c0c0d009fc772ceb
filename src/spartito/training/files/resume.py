"""What training goes on from: one checkpoint for all, and where its position means the same."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spartito.checkpoint.in_store import fetch_checkpoint
from spartito.checkpoint.manager import CheckpointManager, identify_checkpoint
from spartito.data.dataset import Dataset
from spartito.data.source import BlockSource, OrderedSource
from spartito.engine.updates.optimizers import unwrap
from spartito.errors import UserError
from spartito.steps.coordination import Coordination
from spartito.training.backups.identity import EXAMPLES, OPTIONS, sample
from spartito.training.callback import Callback

if TYPE_CHECKING:
    from spartito.training.trainer import Trainer

_ORDER = ("batch_size", "examples", "drop_remainder", "shuffled", "seed", "blocks")


def meaning(chain: Dataset, steps: int | None, seed: int) -> dict[str, Any]:
    """What a position (pass, step) and a number of batches done depend on, as JSON."""
    return {
        "batch_size": chain.batch_size,
        "examples": chain.examples,
        "drop_remainder": chain.drop_remainder,
        "shuffled": chain.shuffled,
        "seed": seed if chain.seed is None else chain.seed,
        "blocks": _blocks(chain),
        "repeats": chain.repeats,
        "steps_per_epoch": steps,
    }


def _blocks(chain: Dataset) -> str | None:
    """What the order of examples in blocks, or of a mixture, depends on besides."""
    if chain.lengths is not None:
        return f"by length (checksum {zlib.crc32(chain.lengths.tobytes()):08x})"
    if isinstance(chain.source, OrderedSource):
        return chain.source.form
    if not isinstance(chain.source, BlockSource):
        return None
    edges = chain.source.edges
    cut = zlib.crc32(edges.astype("<i8").tobytes())
    return f"{chain.live or 1} of {len(edges) - 1} (checksum {cut:08x})"


def trained_on(trainer: Trainer, chain: Dataset, steps: int | None) -> dict[str, Any]:
    """What a backup must be of to go on with it: the model and how it learns, and the data.

    Examples are read on the chief alone, which compares them.
    """
    optimizer, schedule = trainer.optimizer, trainer.scheduler
    return {
        "model": type(unwrap(trainer.model)).__name__,
        "optimizer": type(optimizer).__name__,
        "schedule": schedule and type(schedule).__name__,
        **meaning(chain, steps, trainer.seed),
        OPTIONS: trainer.first_options,
        EXAMPLES: sample(chain) if trainer.is_chief else None,
    }


def check_position(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on in the middle of a pass or epoch that would be another one now.

    ``saved`` is what `TrainingLoop.state_dict` returned. Between two passes everything may change,
    in the middle of one nothing that says which examples come next.
    """
    then = saved.get("meaning")
    if then is None:  # a checkpoint of an earlier version
        return
    then = {"blocks": None, **then}  # which earlier versions had none of
    position, done = saved["data"], saved["done"]
    keys = list(_ORDER) if position["step"] else []
    if done:
        keys += ["steps_per_epoch"]
    if done or (now["repeats"] and position["pass"] % now["repeats"]):
        keys += ["repeats"]
    for key in keys:
        if then[key] != now[key]:
            raise UserError(
                f"the checkpoint was written after {position['step']} batches of a pass "
                f"({done} of its epoch) with {key}={then[key]}, and this fit has {key}={now[key]}",
                "Go on with the same until the epoch is over, or begin a whole epoch: "
                "fit(..., initial_epoch=N).",
            )


def next_epoch(position: dict[str, Any], chain: Dataset) -> dict[str, int]:
    """The first position of an epoch whose order of examples was not begun before ``position``."""
    number = position["pass"] + (position["step"] > 0)
    repeats = chain.repeats or 1
    return {"pass": -(-number // repeats) * repeats, "step": 0}


def find_together(coordination: Coordination, path: str | Path) -> Path:
    """The checkpoint at ``path``, or the newest in that folder, which every replica can read.

    Raises `UserError` on all of them when one cannot, or when they have found different ones.
    """

    def find() -> str:
        here = fetch_checkpoint(path)
        if here.is_file():
            raise UserError(
                f"{path} is a file, and no checkpoint's folder",
                f"Weights alone: trainer.load_weights({str(path)!r}).",
            )
        found = CheckpointManager(here).latest() or here
        return f"{identify_checkpoint(found)} {found}"

    came = [text.partition(" ") for text in coordination.attempt(find)]
    if len({identity for identity, _, _ in came}) > 1:
        names = [
            f"{coordination.cluster.name_of(rank)} {found} ({identity[:8]})"
            for rank, (identity, _, found) in enumerate(came)
        ]
        raise UserError(
            f"the replicas have read different checkpoints: {', '.join(names)}",
            "All must read the same one: from a folder that all machines share, or from equal "
            "copies of it, once the call that saved it has returned on every replica.",
        )
    own = coordination.cluster.rank if len(came) > 1 else 0
    return Path(came[own][2])


def restore(callbacks: Sequence[Callback], saved: Sequence[Sequence[Any]]) -> None:
    """Give each callback the state that the first one left of its class had saved."""
    left = list(saved)
    for callback in callbacks:
        for entry in left:
            if entry[0] == type(callback).__name__:
                left.remove(entry)
                callback.load_state_dict(entry[1])
                break


def into_epoch(loop: dict[str, Any], steps: int | None) -> int:
    """How many batches of the epoch that comes next were trained on before.

    Args:
        loop: The state of one, as a checkpoint keeps it.
        steps: The batches of an epoch; None: those of a pass over the data. One that was ended in
            between goes on with what is left of it.
    """
    done = int(loop["done"])
    return done if steps is not None else max(done, int(loop["data"].get("step", 0)))
