"""Which Spartito and torch a task runs, and whether tasks with these may work together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Self

from msgspec import Meta

from spartito import __version__
from spartito.errors import UserError
from spartito.names import who_has


@cache
def _installed(package: str) -> str:
    """Its version; reading what is installed takes milliseconds."""
    try:
        return version(package)
    except PackageNotFoundError:
        if package != "spartito":
            raise
        return __version__  # sources alone


_SHORT = Meta(max_length=100, pattern=r"\A[\w.+!-]*\Z")


@dataclass(frozen=True, slots=True)
class Versions:
    """What is installed, as ``0.1.0`` and ``2.5.1+cpu``.

    Tasks tell it in their first words. These fields stay in every release, so that one release
    can refuse another by its name.
    """

    spartito: Annotated[str, _SHORT]
    torch: Annotated[str, _SHORT]

    @classmethod
    def own(cls) -> Self:
        """Those of this process."""
        return cls(_installed("spartito"), _installed("torch"))

    @property
    def torch_series(self) -> str:
        """torch's major and minor version: patches and builds compute the same."""
        return ".".join(self.torch.partition("+")[0].split(".")[:2])


def check_versions(versions: Mapping[str, Versions]) -> None:
    """Raise `UserError` unless the tasks of these names have versions that fit together.

    Spartito must be the same: what tasks say to each other changes with it. Of torch, whose
    kernels change between minor versions, major and minor version must be.
    """
    if len({one.spartito for one in versions.values()}) > 1:
        raise UserError(
            f"the tasks have different versions of Spartito: "
            f"{_listed({name: one.spartito for name, one in versions.items()})}",
            "Install the same one on all machines; spartito doctor shows who has which.",
        )
    if len({one.torch_series for one in versions.values()}) > 1:
        raise UserError(
            f"the tasks have different versions of torch: "
            f"{_listed({name: one.torch for name, one in versions.items()})}",
            "The same model may come to other numbers there: install torch with the same two "
            "first numbers on all machines; spartito doctor shows who has which.",
        )


def _listed(versions: Mapping[str, str]) -> str:
    """As ``0.1.0 on worker 0 and worker 2, 0.2.0 on worker 1``."""
    having = who_has(versions).items()
    return ", ".join(f"{text} on {' and '.join(names)}" for text, names in having)
