"""Slices of TPUs in GKE: from ``v5e:4x4`` to what a pod says that asks for a host of one; pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from spartito.errors import UserError
from spartito.names import nearest

RESOURCE = "google.com/tpu"
ACCELERATOR = "cloud.google.com/gke-tpu-accelerator"
TOPOLOGY = "cloud.google.com/gke-tpu-topology"
EXCLUSIVE = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
"""What has JobSet give each job a node pool of its own: GKE makes one for each slice."""

EDGE = 4
"""Larger slices are of cubes with sides of four chips."""

FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SMALL = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")


@dataclass(frozen=True, slots=True)
class Generation:
    """What GKE calls a generation, and which slices there are of it.

    ``topologies`` are listed; with ``most`` those of whole cubes too, with at most so many chips.
    A slice of at most ``single`` chips is one host, else each host has four of them. Torch sees
    ``devices`` of each chip.
    """

    label: str
    topologies: tuple[str, ...]
    most: int = 0
    single: int = 4
    devices: int = 1


GENERATIONS = {
    "v4": Generation("tpu-v4-podslice", SMALL, 4096),
    "v5e": Generation("tpu-v5-lite-podslice", FLAT, single=8),
    "v5p": Generation("tpu-v5p-slice", SMALL, 6144),
    "v6e": Generation("tpu-v6e-slice", FLAT, single=8),
    "tpu7x": Generation("tpu7x", ("1x1x1", *SMALL), 9216, devices=2),
}
"""After "Plan TPUs in GKE" (cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus), the pages
of each generation at cloud.google.com/tpu/docs, and xpk's table of node pools. Of v5e and v6e
there is 2x4 as one host of eight chips and as two of four: the one host is meant here."""


@dataclass(frozen=True, slots=True)
class TpuSlice:
    """A slice: what its nodes are called, its ``hosts``, and the ``chips`` of each.

    Torch sees ``devices`` of each chip; ``name`` is what the user wrote.
    """

    name: str
    accelerator: str
    topology: str
    chips: int
    hosts: int
    devices: int = 1

    @property
    def tasks(self) -> int:
        """The processes of each host: one for each device."""
        return self.chips * self.devices

    @property
    def selector(self) -> dict[str, str]:
        """By which labels its nodes are found."""
        return {ACCELERATOR: self.accelerator, TOPOLOGY: self.topology}


def parse_tpu(text: str) -> TpuSlice:
    """The slice that ``--tpu`` names.

    Args:
        text: the generation and the topology, as ``v5e:4x4``.

    Returns:
        What a pod on it asks for.

    Raises:
        UserError: there is no such slice.
    """
    name, colon, topology = text.partition(":")
    if name not in GENERATIONS or not colon:
        raise UserError(
            f"--tpu {text!r} names no TPU",
            f"Write a generation ({', '.join(GENERATIONS)}) and a topology: v5e:4x4."
            + (f" {nearest(name, GENERATIONS)}" if name not in GENERATIONS else ""),
        )
    found = GENERATIONS[name]
    sides = _sides(topology)
    if topology not in found.topologies and not _is_cubes(sides, found.most):
        cubes = f", or sides that are multiples of {EDGE} in rising order, of at most {found.most} "
        raise UserError(
            f"--tpu {text}: GKE has no slice {topology!r} of {name}",
            f"It has {', '.join(found.topologies)}{f'{cubes}chips: 4x4x8' if found.most else ''}.",
        )
    chips = math.prod(sides)
    each = chips if chips <= found.single else 4
    return TpuSlice(text, found.label, topology, each, chips // each, found.devices)


def _sides(topology: str) -> list[int]:
    """The sides of a topology, none where it is not written as one."""
    words = topology.split("x")
    plain = all(word.isascii() and word.isdigit() and word[0] != "0" for word in words)
    return [int(word) for word in words] if plain else []


def _is_cubes(sides: Collection[int], most: int) -> bool:
    whole = all(side % EDGE == 0 for side in sides)
    return len(sides) == 3 and whole and list(sides) == sorted(sides) and math.prod(sides) <= most
