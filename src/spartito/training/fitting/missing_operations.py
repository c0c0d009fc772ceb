"""An operation that a device does not have: in which module it was called, and what helps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from torch import nn


@dataclass(frozen=True, slots=True)
class Missing:
    """What torch lacks.

    Attributes:
        operation: As torch calls it.
        where: The device or the numbers for which it lacks it.
        help: What to do.
    """

    operation: str
    where: str
    help: str


_FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK=1 has the CPU compute it"
_ON_CPU = "have that module compute on the CPU, or write it with other operations"
_WIDER = "have that module compute in fp32: x.float() before it, or precision='fp32'"
_FORMS = (
    r"Could not run '(?P<operation>[\w:.]+)' with arguments from the '(?P<device>\w+)' backend",
    r"The operator '(?P<operation>[\w:.]+)' is not currently \w+ (?:for|on) the (?P<device>MPS)",
    r"\"(?P<operation>\w+)\" not implemented for '(?P<numbers>\w+)'",
    r"(?P<operation>[\w.]+): Low precision dtypes not supported\. Got (?P<numbers>\w+)",
)
"""How torch says so: it has no error of its own for it."""


def missing_in(error: Exception) -> Missing | None:
    """What torch lacks, if an error is about that.

    Args:
        error: Any.
    """
    if not isinstance(error, NotImplementedError | RuntimeError):
        return None
    for form in _FORMS:
        if found := re.search(form, str(error)):
            return _missing(**found.groupdict())
    return None


def _missing(operation: str, device: str = "", numbers: str = "") -> Missing:
    if numbers:
        return Missing(operation, f"numbers of type {numbers}", _WIDER)
    help_ = f"{_FALLBACK}; or {_ON_CPU}" if device == "MPS" else _ON_CPU
    return Missing(operation, f"the device {device}", help_)


def called_in(error: Exception, model: nn.Module) -> str:
    """The innermost module of a model in whose ``forward`` an error was raised, in words.

    Args:
        error: As it was caught.
        model: The user's.
    """
    names = {id(module): name for name, module in model.named_modules()}
    for frame in reversed([*_frames(error)]):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names:
            name, kind = names[id(module)], type(module).__name__
            return f"in the model's module {name!r} ({kind})" if name else f"in the model, {kind}"
    return (
        "outside of the model's modules: in the loss, or in the backward pass, of which "
        "torch.autograd.set_detect_anomaly(True) shows the call"
    )


def note_missing(error: Exception, model: nn.Module) -> None:
    """Add a note to an error about an operation that torch lacks: where it was called.

    Args:
        error: What a step has raised.
        model: The user's.
    """
    if (missing := missing_in(error)) is not None:
        error.add_note(
            f"spartito: torch has no {missing.operation} for {missing.where}. It was called "
            f"{called_in(error, model)}. What helps: {missing.help}."
        )


def _frames(error: Exception) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
