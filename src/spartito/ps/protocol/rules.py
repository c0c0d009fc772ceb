"""The rules by which pushes of many workers become updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

import msgspec

from spartito.errors import UserError
from spartito.names import nearest
from spartito.numeric import is_number, is_whole

ON_STALE = ("compensate", "reject", "scale", "wait")
PUBLISHED = 0.04
"""The strength of a compensation in Zheng et al. 2017."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How pushes become updates: equal on all tasks of a job.

    ``workers`` compute; ``max_staleness`` None is without a bound; ``on_stale`` says what
    becomes of a push beyond it, and ``compensation`` and ``mean_square`` how much of it is
    compensated; ``aggregate`` pushes make one update; ``clip_norm`` bounds the
    gradient of an update that is a mean of several pushes (a single one is clipped by its
    worker). With ``replicas=2`` every value is on two servers. The rest says how values are
    divided over servers, and travel. Raises `UserError` where these cannot be.

    With ``every`` workers are groups that train apart: each pushes what it has moved in so many
    updates, and ``quorum`` of them are merged ``grace`` seconds after so many have come. What is
    more than ``max_staleness`` merges old is rejected then.
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
    compensation: float | None = None
    mean_square: float | None = None
    every: int = 0
    quorum: int = 1
    grace: float = 0.0

    def __post_init__(self) -> None:
        stale = self.max_staleness
        if stale is not None and (not is_whole(stale) or stale < 0):
            raise UserError(
                f"max_staleness={stale!r}",
                "0 averages all workers' pushes, n bounds the staleness, None lets nobody wait.",
            )
        if self.on_stale not in ON_STALE:
            raise UserError(f"on_stale={self.on_stale!r}", nearest(str(self.on_stale), ON_STALE))
        if self.on_stale in ("compensate", "scale") and self.together:
            raise UserError(
                f"on_stale={self.on_stale!r} with max_staleness=0",
                "Pushes that are averaged step by step are never stale: leave one of them out.",
            )
        if self.mean_square is not None and self.replicas > 1:
            raise UserError(
                f"mean_square={self.mean_square} with replicas={self.replicas}",
                "The mean of squares would be on one server alone: leave one of them out.",
            )
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

    def refuses(self, staleness: int, known: bool) -> bool:
        """Whether a push is to be computed again; ``known``: the values that it was computed with.

        Without them it cannot be compensated.
        """
        if self.on_stale == "compensate":
            return not known and staleness > (self.max_staleness or 0)
        limit = None if self.on_stale == "scale" else self.max_staleness
        return limit is not None and staleness > limit

    @property
    def strength(self) -> float:
        """Of the compensation: as asked, or as published."""
        return PUBLISHED if self.compensation is None else self.compensation

    @property
    def spans(self) -> int:
        """How many parts the values are divided into."""
        return self.servers // self.replicas

    @property
    def together(self) -> bool:
        """Whether the workers' pushes are averaged step by step."""
        return self.max_staleness == 0 and not self.every

    @property
    def in_rounds(self) -> bool:
        """Whether an update is made of the pushes of workers that are named before."""
        return self.together or self.every > 0

    @property
    def in_step(self) -> bool:
        """Whether every worker takes part in every update."""
        return self.together or (self.every > 0 and self.quorum >= self.workers)

    @property
    def waits(self) -> bool:
        """Whether a pull may have to wait, so that no push gets too stale."""
        return bool(self.max_staleness) and self.on_stale == "wait" and not self.every

    @property
    def noun(self) -> str:
        """What pushes."""
        return "group" if self.every else "worker"

    def name_of(self, worker: int) -> str:
        """What messages call who pushes as ``worker``: a group where these train apart."""
        return f"{self.noun} {worker}"

    def check_deterministic(self, has_batchnorm: bool) -> None:
        """Raise `UserError` where two runs would not be alike."""
        if not self.in_step:
            known = f"max_staleness={self.max_staleness}"
            do = "max_staleness=0"
            if self.every:
                known, do = f"quorum={self.quorum} of {self.workers} groups", "a quorum of all"
            raise UserError(
                f"deterministic training with {known}",
                "Workers that do not wait for each other never run twice alike: "
                f"use {do}, or a synchronous strategy.",
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


def stale_rules(on_stale: object) -> dict[str, Any]:
    """What a user has said of stale pushes, as `Rules` have it.

    Args:
        on_stale: One of `ON_STALE`, or ``{"compensate": 0.04, "mean_square": 0.95}``, the latter
            perhaps left out.

    Raises:
        UserError: It is another one, or says no strength.
    """
    if not isinstance(on_stale, Mapping):
        return {"on_stale": on_stale}
    said = f"on_stale={dict(on_stale)!r}"
    for name in on_stale:
        if name not in ("compensate", "mean_square"):
            raise UserError(said, nearest(str(name), ("compensate", "mean_square")))
    strength, decay = on_stale.get("compensate"), on_stale.get("mean_square")
    if not _is_below(strength, inf) or ("mean_square" in on_stale and not _is_below(decay, 1.0)):
        raise UserError(
            said,
            "compensate is a strength of at least 0, as 0.04; mean_square, which makes it adapt, "
            'a decay of at least 0 and less than 1: {"compensate": 2, "mean_square": 0.95}.',
        )
    return {"on_stale": "compensate", "compensation": strength, "mean_square": decay}


def _is_below(value: object, most: float) -> bool:
    return is_number(value) and 0 <= value < most
