"""Whether training will fit into the memory of this process, checked before it begins."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Adam, Adamax, NAdam, Optimizer, RAdam

from spartito.errors import UserError
from spartito.system import anonymous_memory
from spartito.system.capacity import memory_limit

MIB = 1 << 20


def check_memory(
    parameters: Sequence[Tensor],
    optimizer: Optimizer,
    state_fraction: float = 1.0,
    limit: float | None = None,
    used: int | None = None,
) -> None:
    """Raise `UserError` when the gradients and the optimizer's state cannot fit beside the model.

    This process will hold ``state_fraction`` of the optimizer's state. ``limit`` and ``used``
    are bytes, by default those of this process. What is counted is the least that a first step
    takes: activations, the batch and copies for the other replicas come on top. Swap counts for
    nothing: all of it is touched in every step.
    """
    limit = memory_limit() if limit is None else limit
    used = anonymous_memory() if used is None else used
    known = [parameter for parameter in parameters if not is_lazy(parameter)]
    size = sum(parameter.numel() * parameter.element_size() for parameter in known)
    more = size * (1 + state_fraction * state_copies(optimizer))
    if used + more > limit:
        count = sum(parameter.numel() for parameter in known)
        raise UserError(
            f"the model is too large for the memory: {count:,} parameters that learn need "
            f"{more / MIB:,.0f} MiB more for gradients and {type(optimizer).__name__}; "
            f"{used / MIB:,.0f} of {limit / MIB:,.0f} MiB are in use",
            "Raise the container's limit (--memory, mem_limit in the file), take a smaller "
            "model, or an optimizer with less state, as SGD.",
        )


def state_copies(optimizer: Optimizer) -> int:
    """How many values the optimizer keeps for each parameter; 0 for those not known here."""
    if isinstance(optimizer, Adam | NAdam | RAdam | Adamax):
        return 2
    if isinstance(optimizer, SGD):
        return int(any(group["momentum"] for group in optimizer.param_groups))
    return 0
