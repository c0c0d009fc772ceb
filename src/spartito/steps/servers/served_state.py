"""The state of an optimizer whose steps servers make: what a script does to it here is lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from spartito.errors import UserError

_are_ours = False


class ServedState(defaultdict[Any, Any]):
    """Refuses to be begun anew, or looked through."""

    def clear(self) -> None:
        """Refuse, unless it is our own code."""
        if not _are_ours:
            raise _elsewhere("optimizer.state.clear()")
        super().clear()

    def values(self) -> Any:
        """As `clear`."""
        if not _are_ours:
            raise _elsewhere("optimizer.state.values()")
        return super().values()


@contextmanager
def ours() -> Iterator[None]:
    """A block in which our own code puts together, or takes apart, what the servers have."""
    global _are_ours
    before, _are_ours = _are_ours, True
    try:
        yield
    finally:
        _are_ours = before


def watch_state(optimizer: Optimizer) -> Callable[[], None]:
    """Have a script refused that saves, loads or begins anew what servers have.

    Args:
        optimizer: The user's own.

    Returns:
        What ends that.
    """

    def refuse_saving(optimizer: Optimizer) -> None:
        if not _are_ours:
            raise _elsewhere("optimizer.state_dict()")

    def refuse_loading(optimizer: Optimizer, state: Any) -> None:
        if not _are_ours:
            raise _elsewhere("optimizer.load_state_dict()")

    hooks = (
        optimizer.register_state_dict_pre_hook(refuse_saving),
        optimizer.register_load_state_dict_pre_hook(refuse_loading),
    )
    optimizer.state = ServedState(dict, optimizer.state)

    def end() -> None:
        for hook in hooks:
            hook.remove()
        optimizer.state = defaultdict(dict, optimizer.state)

    return end


def _elsewhere(call: str) -> UserError:
    return UserError(
        f"{call} under parameter_server: the servers have the optimizer's state",
        "strategy.state_dict() has it. Load what strategy.save(folder) wrote, by "
        "strategy.load(folder), or take a synchronous strategy.",
    )
