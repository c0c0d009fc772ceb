"""What a metric is: a state that adds up over batches, replicas and leases, and its value."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, TypeAlias

import msgspec
import torch
from torch import Tensor

from spartito.engine.devices.host_reads import on_host
from spartito.engine.losses.loss import LossFunction
from spartito.errors import UserError

State: TypeAlias = dict[str, Any]
"""What a metric has seen: tensors, and lists of tensors (rows that are kept), by name."""
Value: TypeAlias = Any
"""A float, or nested lists or a mapping of them (a confusion matrix, one value per class)."""

NAN = float("nan")
REDUCTIONS = ("sum", "max", "min")


class Metric(ABC):
    """A figure over all examples of an epoch or evaluation, exact over replicas.

    Each replica gathers a ``state`` from its own rows; the states of all are merged once, at the
    end, and `compute` makes the figure of the whole. So it is no average of averages.

        class Worst(sp.metrics.Metric):
            reductions = {"worst": "max"}

            def reset(self):
                self.state = {"worst": torch.tensor(0.0)}

            def update(self, output, target, size):
                error = (output - target).abs().max()
                self.state["worst"] = torch.maximum(self.state["worst"].to(error.device), error)

            def compute(self):
                return self.state["worst"].item()

    ``reductions`` says how a tensor of the state is merged: "sum" (what is not named), "max" or
    "min". A list of tensors is concatenated in the order of the ranks. A name may be missing
    from the state of a replica that had no rows.

    Args:
        name: Under which the figure stands in logs and history.
    """

    reductions: ClassVar[Mapping[str, str]] = {}
    costly: bool = False
    """Whether `compute` takes long: then it is not shown while an epoch runs."""
    state: State

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    @abstractmethod
    def reset(self) -> None:
        """Forget what came so far: give ``state`` new tensors."""

    @abstractmethod
    def update(self, output: Any, target: Any, size: int) -> None:
        """Add a local batch to the state, without reading values from the device.

        Args:
            output: What the model returned.
            target: The batch's target.
            size: How many examples these are, 1 or more.
        """

    @abstractmethod
    def compute(self) -> Value:
        """Compute the figure of the state.

        Returns:
            A float (NaN before the first example), or lists or a mapping of floats.
        """

    def adapt(self, loss: LossFunction | None) -> None:  # noqa: B027 - few have to
        """Learn from the trainer's loss how outputs are to be read: as logits, say.

        Args:
            loss: The trainer's; None where the model computes its own.
        """

    def state_dict(self) -> State:
        """What is sent to other tasks and saved with a checkpoint.

        Returns:
            The state: tensors, and lists of tensors, by name.
        """
        return self.state

    def merge(self, states: Sequence[State]) -> None:
        """Replace the state by what all of ``states`` have seen together.

        Args:
            states: As `state_dict` returned them, on the CPU, in the order of the ranks.
        """
        self.reset()
        for name in dict.fromkeys(name for state in states for name in state):
            parts = [state[name] for state in states if name in state]
            self.state[name] = merged(parts, self.reductions.get(name, "sum"))

    def fresh(self) -> Self:
        """A metric of the same kind that has seen nothing.

        Returns:
            The copy.
        """
        made = copy.copy(self)
        made.reset()
        return made


def merged(parts: Sequence[Any], reduction: str) -> Any:
    """One tensor, or list of tensors, of those of several replicas."""
    if isinstance(parts[0], list):
        return [tensor for part in parts for tensor in part]
    stacked = torch.stack([torch.as_tensor(part) for part in parts])
    if reduction == "sum":
        return stacked.sum(0)
    if reduction not in REDUCTIONS:
        raise UserError(
            f"a metric's state is reduced by {reduction!r}", f"Known: {', '.join(REDUCTIONS)}."
        )
    return stacked.amax(0) if reduction == "max" else stacked.amin(0)


def named(name: str, value: Value) -> dict[str, Value]:
    """The figures of a metric: one by its name, or ``name_key`` for each key of a mapping.

    Those of one without a name have their keys.
    """
    found = plain(value)
    if isinstance(found, dict):
        return {f"{name}_{key}" if name else key: part for key, part in found.items()}
    return {name: found}


def plain(value: Any) -> Value:
    """``value`` as JSON has it: floats in nested lists and dicts."""
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, Tensor):
        return value.tolist() if value.dim() else float(value)
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value if isinstance(value, int) else float(value)


class Packed(msgspec.Struct, frozen=True):
    """A tensor on its way to another task."""

    dtype: str
    shape: list[int]
    values: bytes


_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.complex64, torch.complex128,
    )
}  # fmt: skip
_PARTS = list[dict[str, Packed | list[Packed]]]


def encode(states: Sequence[State]) -> bytes:
    """The states of several metrics as bytes; `UserError` for what is no tensor.

    What lies on a device comes to the host at once.
    """
    return msgspec.msgpack.encode(
        [
            {
                name: [_pack(name, part) for part in value]
                if isinstance(value, list)
                else _pack(name, value)
                for name, value in state.items()
            }
            for state in on_host(list(states))
        ]
    )


def decode(data: bytes) -> list[State]:
    """What `encode` was given, on the CPU."""
    return [
        {
            name: [_unpack(part) for part in value] if isinstance(value, list) else _unpack(value)
            for name, value in state.items()
        }
        for state in msgspec.msgpack.decode(data, type=_PARTS)
    ]


def _pack(name: str, value: Any) -> Packed:
    if not isinstance(value, Tensor) or str(value.dtype).removeprefix("torch.") not in _DTYPES:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise UserError(
            f"the state {name!r} of a metric is of {kind}, which cannot go to another task",
            "A state holds tensors of numbers, and lists of them.",
        )
    rows = value.detach().contiguous()
    values = rows.reshape(-1).view(torch.uint8).numpy().tobytes()
    return Packed(str(value.dtype).removeprefix("torch."), list(value.shape), values)


def _unpack(packed: Packed) -> Tensor:
    dtype = _DTYPES[packed.dtype]
    if not packed.values:
        return torch.empty(packed.shape, dtype=dtype)
    return torch.frombuffer(bytearray(packed.values), dtype=dtype).reshape(packed.shape)
