"""What Kubernetes allows as a name, a quantity: checked before there is a file."""

from __future__ import annotations

import re
from decimal import Decimal

from spartito.errors import UserError
from spartito.launch.containers.plan import LEAST_MEMORY

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
"""A part of a name in DNS (RFC 1123)."""

SERVICE = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""The name of a service (RFC 1035): a letter comes first."""

LONGEST, LONGEST_NAME = 63, 253
"""Characters of a label, and of a name of several labels."""

SUFFIX = 6
"""Characters that a Job adds to a pod's name behind its host name."""

QUANTITY = re.compile(
    r"(?P<number>\d+(\.\d*)?|\.\d+)(?P<suffix>[KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?"
)
SUFFIXES = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def check_label(option: str, text: str, rule: re.Pattern[str] = LABEL, most: int = LONGEST) -> None:
    """Raise `UserError` where ``text``, the value of ``option``, is no label of DNS."""
    if rule.fullmatch(text) and len(text) <= most:
        return
    if len(text) > most:
        raise UserError(
            f"{option} {text!r} has {len(text)} characters", f"At most {most} are possible there."
        )
    first = "a letter" if rule is SERVICE else "a letter or a digit"
    raise UserError(
        f"{option} {text!r} is no name in Kubernetes",
        f"Use small letters, digits and -, with {first} first and no - at the end.",
    )


def check_name(option: str, text: str) -> None:
    """Raise `UserError` where ``text`` cannot name an object, as a claim or a class."""
    if len(text) <= LONGEST_NAME and all(map(LABEL.fullmatch, text.split("."))):
        return
    raise UserError(
        f"{option} {text!r} cannot be the name of one in Kubernetes",
        f"Use small letters, digits, - and ., with a letter or a digit at both ends, at most "
        f"{LONGEST_NAME} characters.",
    )


def check_memory(text: str) -> None:
    """Raise `UserError` where ``text``, the value of ``--memory``, does not hold torch."""
    if quantity("--memory", text) < LEAST_MEMORY:
        raise UserError(
            f"--memory {text} is too small: Python and torch alone take {LEAST_MEMORY >> 20}Mi",
            "The model, its optimizer and a batch need memory as well: --memory 4Gi, for example.",
        )


def quantity(option: str, text: str) -> Decimal:
    """The number that ``text``, the value of ``option``, means in Kubernetes.

    Args:
        option: for the error.
        text: as ``500m``, ``2`` or ``4Gi``.

    Returns:
        The number, in the base of its kind.

    Raises:
        UserError: it means none, or none above 0.
    """
    found = QUANTITY.fullmatch(text)
    if found is None:
        raise UserError(
            f"{option} {text!r} is no quantity of CPUs or memory",
            "Write 500m or 2 for CPUs, 512Mi or 4Gi for memory.",
        )
    number, suffix = Decimal(found["number"]), found["suffix"] or ""
    if suffix.endswith("i"):
        number *= 1024 ** ("KMGTPE".index(suffix[0]) + 1)
    elif suffix in SUFFIXES:
        number *= Decimal(10) ** SUFFIXES[suffix]
    else:
        number *= Decimal(10) ** int(suffix[1:])
    if number <= 0:
        raise UserError(f"{option} {text} is not above 0")
    return number
