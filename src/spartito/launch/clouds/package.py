"""What a node installs so that it has the Spartito that is here."""

from __future__ import annotations

import json
import re
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from spartito.errors import UserError
from spartito.launch.target import named_here

NAME = "spartito"
WHEEL = ".whl"


def installed_package() -> tuple[str, str]:
    """What pip installs to have the Spartito that is here, as its own notes say.

    Returns:
        The requirement, or the path of a wheel; and the folder that it was installed from, where
        nobody knows an index that has it: else "".
    """
    own = distribution(NAME)
    pinned = f"{NAME}=={own.version}"
    notes = own.read_text("direct_url.json")  # PEP 610: not there for what an index had
    if notes is None:
        return pinned, ""
    source = json.loads(notes)
    url = source["url"]
    if "vcs_info" in source:
        found = source["vcs_info"]
        return f"{NAME} @ {found['vcs']}+{url}@{found['commit_id']}", ""
    if not url.startswith("file:"):
        return f"{NAME} @ {url}", ""
    path = Path(unquote(urlsplit(url).path))
    if path.suffix == WHEEL and path.is_file():
        return named_here("the wheel", path), ""
    return pinned, str(path)


def asked_package(text: str) -> str:
    """What ``--package`` asks for: a requirement, or a wheel that is here.

    Raises:
        UserError: it is neither.
    """
    if not text.endswith(WHEEL):
        if not text.strip() or re.search(r"[\x00-\x1f]", text) or text.startswith("-"):
            raise UserError(f"--package {text!r} is nothing that pip installs")
        return text
    if not Path(text).is_file():
        raise UserError(f"--package {text} is no file", f"The folder we are in is {Path.cwd()}.")
    return named_here("--package", Path(text))


def is_wheel(package: str) -> bool:
    """Whether it is a file that goes along, and not a requirement."""
    return package.endswith(WHEEL) and " @ " not in package


def of_no_index(package: str, folder: str = "FOLDER") -> str:
    """What is to be done where no index may have ``package``, installed here from ``folder``."""
    version = package.partition("==")[2]
    return (
        f"{package} was installed from a folder here, and an index may not have it. Make a wheel "
        f"(pip wheel --no-deps {folder}), and name that: --package "
        f"{NAME}-{version}-py3-none-any.whl"
    )
