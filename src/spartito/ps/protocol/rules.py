"""The rules by which pushes of many workers become updates."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

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
    worker). With ``replicas=2`` every value is on two servers. The rest says how values are
    divided over servers, and travel. Raises `UserError` where these cannot be.
    """

    workers: int
    max_staleness: int | None = None
    on_stale: str = "wait"
    aggregate: int = 1
    clip_norm: float | None = None
    servers: int = 1
    min_shard_bytes: int = 0
    wire_dtype: str | None = None
    replicas: int = 1

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
        if self.replicas not in (1, 2):
            raise UserError(
                f"replicas={self.replicas!r}",
                "1 keeps every value on one server, 2 on two, either of which may die.",
            )
        if self.servers % self.replicas:
            raise UserError(
                f"replicas={self.replicas} with {self.servers} servers",
                "Two servers have the same values: start an even number of them (--ps 2).",
            )
        if self.aggregate > 1 and self.replicas > 1:
            raise UserError(
                f"aggregate={self.aggregate} with replicas={self.replicas}",
                "A push that waits for others would be on one server alone: leave one of them out.",
            )
        if self.aggregate > 1 and self.together:
            raise UserError(
                f"aggregate={self.aggregate} with max_staleness=0",
                "That averages one push of every worker already: leave aggregate out.",
            )

    @property
    def spans(self) -> int:
        """How many parts the values are divided into."""
        return self.servers // self.replicas

    @property
    def together(self) -> bool:
        """Whether the workers' pushes are averaged step by step."""
        return self.max_staleness == 0

    @property
    def waits(self) -> bool:
        """Whether a pull may have to wait, so that no push gets too stale."""
        return bool(self.max_staleness) and self.on_stale == "wait"

    def check_deterministic(self, has_batchnorm: bool) -> None:
        """Raise `UserError` where two runs would not be alike."""
        if not self.together:
            raise UserError(
                f"deterministic training with max_staleness={self.max_staleness}",
                "Workers that do not wait for each other never run twice alike: "
                "use max_staleness=0, or a synchronous strategy.",
            )
        if has_batchnorm:
            raise UserError(
                "deterministic training of a model with BatchNorm under parameter_server",
                "Its replicas do not meet in the forward pass: leave deterministic out, "
                "or choose mirrored.",
            )

    def clipping_means(self, clip_norm: float, spans: int) -> Rules:
        """The same with the norm of a mean over workers bounded, which one server has whole."""
        if spans > 1:
            raise UserError(
                f"clip_norm={clip_norm} of a mean over workers, on several servers",
                "No server has the whole of it: use one ps, or neither max_staleness=0 "
                "nor aggregate.",
            )
        return replace(self, clip_norm=clip_norm)

    def __str__(self) -> str:
        return msgspec.json.encode(asdict(self)).decode()
