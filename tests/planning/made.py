"""Profiles and clusters that nobody measured, for tests of what is computed of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spartito.launch.lines.line import Link
from spartito.planning.cluster import Cluster, Kind
from spartito.planning.costs.parts import Situation
from spartito.planning.profile import Along, Code, Line, Machine, Model, Part, Profile, Sample

MACHINE = Machine(
    cores=4,
    memory=8e9,
    shared=Line(1e-5, 2e-10),
    copy=1e-10,
    sockets=Line(1e-4, 8e-10),
    contention=0.1,
    crowds={},
    disk=2e8,
    start=4.0,
    codes={"8bit": Code(0.252, 1e-9, 3e-10), "4bit": Code(0.127, 1e-9, 3e-10)},
    overheads={},
    overheads_between={},
)
PROFILE = Profile(
    target="train.py",
    source="0123",
    spartito="0",
    torch="0",
    model=Model("Net", 1, 8_000_000, 8_000_000, 12, 2_000_000, 0, 16_000_000, "Adam"),
    batch_size=64,
    examples=6400,
    steps_per_epoch=100,
    accumulate=1,
    tokens_per_example=None,
    example_bytes=1000.0,
    device="cpu",
    base_memory=300_000_000,
    fork_saves=50_000_000,
    activations=100_000.0,
    scratch=1_000_000.0,
    adding=1e-3,
    samples=(
        Sample(1, 64, 1e-4, 1e-2, 2e-2, 4e-3, 1e-4, 100, 0.02, 0.04),
        Sample(1, 16, 1e-4, 3e-3, 6e-3, 4e-3, 1e-4, 100, 0.02, 0.04),
        Sample(4, 64, 1e-4, 4e-3, 8e-3, 2e-3, 1e-4, 100, 0.02, 0.04),
        Sample(4, 16, 1e-4, 1.5e-3, 3e-3, 2e-3, 1e-4, 100, 0.02, 0.04),
    ),
    parts=tuple(Part(f"blocks.{n}", 1e-3, 1_000_000, 4000.0) for n in range(8)),
    uncut="",
    slowdowns={1: 1.1, 2: 1.2, 4: 1.4},
    mesh={2: Along(0.55, 16, 30_000.0, 0.55), 4: Along(0.3, 16, 30_000.0, 0.3)},
    machine=MACHINE,
)


def cluster(
    machines: int = 1, workers: int = 2, link: str | None = "1gbit", memory: float = 8e9
) -> Cluster:
    """Machines of four cores."""
    line = Link.read(link) if link and machines > 1 else None
    return Cluster((Kind("machine", machines, 4, memory),), workers, line)


def situation(batch: int = 512, **given: Any) -> Situation:
    """The profile above on some of them."""
    return Situation(PROFILE, cluster(**given), batch)


def without_variation() -> Profile:
    """The profile of a machine where every step takes as long."""
    samples = tuple(replace(each, deviation=0.0, between_rounds=0.0) for each in PROFILE.samples)
    return replace(PROFILE, samples=samples)
