"""What is a number for a user: Python takes True and False for some."""

from __future__ import annotations

from typing import TypeGuard


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number, whole or not."""
    return isinstance(value, int | float) and not isinstance(value, bool)
