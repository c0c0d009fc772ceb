"""What a call of the backend raises: our errors, which are torch's `RuntimeError` too."""

from __future__ import annotations

from spartito.errors import MismatchedCallsError, TaskLostError, UserError


class RefusedCallError(UserError, RuntimeError):
    """A call that the backend cannot serve: a type that cannot be summed, another device."""


class DifferentCallsError(MismatchedCallsError, RuntimeError):
    """The ranks of a group are at different calls, or their tensors differ."""


class LostRankError(TaskLostError, RuntimeError):
    """A rank is gone, or did not come within the time limit of the group."""
