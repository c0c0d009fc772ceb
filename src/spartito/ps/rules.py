"""The rules by which pushes of many workers become updates."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import msgspec

from spartito.errors import UserError
from spartito.names import nearest

ON_STALE = ("compensate", "reject", "wait")


@dataclass(frozen=True, slots=True)
class Rules:
    """How pushes become updates: equal on all tasks of a job.

    ``workers`` compute; ``max_staleness`` None is without a bound; ``on_stale`` says what
    becomes of a push beyond it; ``aggregate`` pushes make one update; ``clip_norm`` bounds the
    gradient of an update that is a mean of several pushes (a single one is clipped by its
    worker). The rest says how values are divided over servers, and travel. Raises `UserError`
    where these cannot be.
    """

    workers: int
    max_staleness: int | None = None
    on_stale: str = "wait"
    aggregate: int = 1
    clip_norm: float | None = None
    servers: int = 1
    min_shard_bytes: int = 0
    wire_dtype: str | None = None

    def __post_init__(self) -> None:
        stale = self.max_staleness
        if stale is not None and (
            isinstance(stale, bool) or not isinstance(stale, int) or stale < 0
        ):
            raise UserError(
                f"max_staleness={stale!r}",
                "0 averages all workers' pushes, n bounds the staleness, None lets nobody wait.",
            )
        if self.on_stale not in ON_STALE:
            raise UserError(f"on_stale={self.on_stale!r}", nearest(self.on_stale, ON_STALE))
        if self.aggregate < 1:
            raise UserError(f"aggregate={self.aggregate}", "At least one push makes an update.")
        if self.aggregate > 1 and self.together:
            raise UserError(
                f"aggregate={self.aggregate} with max_staleness=0",
                "That averages one push of every worker already: leave aggregate out.",
            )

    @property
    def together(self) -> bool:
        """Whether the workers' pushes are averaged step by step."""
        return self.max_staleness == 0

    @property
    def waits(self) -> bool:
        """Whether a pull may have to wait, so that no push gets too stale."""
        return bool(self.max_staleness) and self.on_stale == "wait"

    def __str__(self) -> str:
        return msgspec.json.encode(asdict(self)).decode()
