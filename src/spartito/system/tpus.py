"""The TPU of this machine, found on its bus: nothing of TPUs is imported or started for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spartito.system.texts import text_of

PCI = Path("/sys/bus/pci/devices")
VFIO = Path("/dev/vfio")
"""Where the devices are that a process may open: in a container only those that it was given."""

GOOGLE = "0x1ae0"
"""The vendor. Google's network cards and disks have it too, so the device counts as well."""

GENERATIONS = {
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "tpu7x",
}
"""By the device's number, as torch_tpu 0.2.0 reads it."""


@dataclass(frozen=True, slots=True)
class Attached:
    """The TPU of a machine: its generation, and how many devices torch sees there.

    A device is a chip; of ``tpu7x`` it is half of one.
    """

    generation: str
    devices: int


def attached(pci: Path = PCI, vfio: Path = VFIO) -> Attached | None:
    """The TPU that this machine has and we may use.

    Args:
        pci: where the system lists what is on the bus.
        vfio: where the devices are that may be opened.

    Returns:
        What there is; None for none.
    """
    if not pci.is_dir():
        return None
    found = [kind for one in sorted(pci.iterdir()) if (kind := _generation(one, vfio))]
    return Attached(found[0], len(found)) if found else None


def _generation(device: Path, vfio: Path) -> str | None:
    if (
        text_of(device / "vendor").strip() != GOOGLE
        or not (vfio / (device / "iommu_group").resolve().name).exists()
    ):
        return None
    return GENERATIONS.get(text_of(device / "device").strip())
