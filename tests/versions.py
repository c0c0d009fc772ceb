"""Tasks that have another version than we have, as far as they can tell."""

from __future__ import annotations

from pathlib import Path


def with_version(folder: Path, package: str, version: str) -> dict[str, str]:
    """An environment in which ``package`` is said to be of this version; written to ``folder``."""
    made = folder / f"{package}-{version}"
    about = made / f"{package}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return {"PYTHONPATH": str(made)}
