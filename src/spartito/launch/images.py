"""What names the image of a container, in every engine."""

from __future__ import annotations

import re

from spartito.errors import UserError

_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"([a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9])"
_DOMAIN = rf"({_HOST}(\.{_HOST})*|\[[a-fA-F0-9:]+\])(:[0-9]+)?"
REFERENCE = re.compile(
    rf"(?P<name>({_DOMAIN}/)?{_PART}(/{_PART})*)"
    r"(?P<tag>:\w[\w.-]{0,127})?(?P<digest>@[A-Za-z][\w+.-]*:[0-9a-fA-F]{32,})?",
    re.ASCII,
)
"""The reference of an image: registry, path in small letters, tag, digest."""


def check_image(text: str, option: str = "--image") -> None:
    """Raise `UserError` where ``text``, the value of ``option``, cannot name an image."""
    found = REFERENCE.fullmatch(text)
    if found is None or len(found["name"]) > 255:
        raise UserError(
            f"{option} {text!r} is no name of an image",
            "Write it as registry.example/team/spartito:1.0, the path in small letters.",
        )


def names_no_registry(image: str) -> bool:
    """Whether ``image`` is one that engines look for among docker.io's own: nobody's."""
    return "/" not in image
