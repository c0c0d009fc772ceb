"""Small packages, installed by pip into a folder of their own: no network, no build isolation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.known_state import of_others


def install(source: Path, target: Path, files: Mapping[str, str]) -> None:
    """Write a package's ``files`` into ``source`` and install it into ``target``."""
    for name, text in files.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    offline = ["--no-index", "--no-build-isolation", "--no-deps", "--target", str(target)]
    subprocess.run([*pip, *offline, str(source)], check=True, timeout=120, env=of_others())
