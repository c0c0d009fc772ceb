"""``spartito data get``: fetches a data set that has a name, or lists them all."""

from __future__ import annotations

import sys
from json import dumps
from pathlib import Path

from spartito.data.sets.downloads import get
from spartito.data.sets.known_sets import KNOWN
from spartito.errors import UserError, show
from spartito.names import size


def main_get(name: str, to: Path | None, mirror: str | None, json: bool = False) -> int:
    """Fetch, say where it is and how it is read, and return the exit code: 0, or 2."""
    if name in KNOWN:
        print(f"{name}: {KNOWN[name].about}. Licence: {KNOWN[name].licence}.", file=sys.stderr)
    try:
        folder = get(name, to, mirror=mirror)
    except UserError as error:
        return show(error)
    known = KNOWN[name]
    reads = known.reads.format(folder)
    if json:
        print(dumps({"name": name, "folder": str(folder), "licence": known.licence}))
    else:
        print(f"{folder}\nread it by {reads}")
    return 0


def main_list(json: bool = False) -> int:
    """Name all data sets with their sizes and licences, and return 0."""
    if json:
        facts = [
            {"name": each.name, "about": each.about, "bytes": each.size, "licence": each.licence}
            for each in KNOWN.values()
        ]
        print(dumps(facts))
        return 0
    for known in KNOWN.values():
        print(f"{known.name:<18}{size(known.size):>8}  {known.about}")
        print(f"{'':<28}licence: {known.licence}")
    return 0
