"""Parameters whose values are elsewhere until something computes with them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NoReturn, Protocol, SupportsIndex

import torch
from torch import nn

from spartito.engine.updates.optimizers import LOADING
from spartito.errors import UserError


class Gathers(Protocol):
    """What can bring the values."""

    def gather_to_stay(self) -> None:
        """Let the parameters show all values; all replicas call it."""
        ...


class Hidden(nn.Parameter):
    """A parameter that has a shape, a dtype and a gradient, and no values.

    A function of torch that asks for those has them gathered first; parameters get this class by
    `cover`, and lose it by `uncover`. Calls that `computes_in` knows nothing of see none.
    """

    asleep = False
    """While no values come: somebody puts a state together without them."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Bring the values, unless the function does without."""
        given = kwargs or {}
        if not _needs_none(func) and not Hidden.asleep:
            for parameter in list(_hidden([*args, *given.values()])):
                home, thread = vars(parameter).get("_home", (None, 0))
                if home is not None and computes_in(thread):
                    home.gather_to_stay()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **given)

    def __repr__(self) -> str:  # type: ignore[override]
        """Not its values: who prints is often one replica alone."""
        return f"Parameter(in shards, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse."""
        raise no_copies()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse."""
        raise no_copies()


def computes_in(thread: int) -> bool:
    """Whether a call is of the model's own computation.

    Calls in other threads only count random numbers, in `engine.randomness`: all values do. A
    backward pass, which may compute again what it needs, has threads of its own on devices.

    Args:
        thread: The one that prepared the model.
    """
    return get_ident() == thread or torch._C._current_graph_task_id() != -1


def no_copies() -> UserError:
    """The error for copies of a model that is kept in shards."""
    return UserError(
        "a copy of a model whose parameters are kept in shards (sharded, zero=3)",
        "Copy it before prepare; strategy.state_dict() has its values whole; or take zero=2.",
    )


def check_shown(model: nn.Module, own: Callable[[nn.Parameter], bool]) -> None:
    """Refuse a model whose values another strategy has in shards.

    Args:
        model: With whatever wraps it.
        own: Whether a parameter was given to this strategy before.

    Raises:
        UserError: No task has all values.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, Hidden) and not own(parameter):
            raise UserError(
                f"the values of {name} are in shards of another strategy (zero=3): each task has a "
                "part of them",
                "Build the model anew, and load what was saved under that strategy before its "
                f"close(): {LOADING}.",
            )


def cover(parameters: Sequence[nn.Parameter], home: Gathers) -> None:
    """Hide these, whose values ``home`` can bring."""
    for parameter in parameters:
        parameter.__class__ = Hidden
        vars(parameter)["_home"] = home, get_ident()


@contextmanager
def asleep() -> Generator[None]:
    """A block in which hidden parameters stay so."""
    before, Hidden.asleep = Hidden.asleep, True
    try:
        yield
    finally:
        Hidden.asleep = before


def uncover(parameters: Sequence[nn.Parameter]) -> None:
    """Show them again."""
    for parameter in parameters:
        parameter.__class__ = nn.Parameter
        vars(parameter).pop("_home", None)


_WITH_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}
_WITHOUT_VALUES = {
    "__len__", "data_ptr", "dim", "element_size", "empty_like", "full_like", "is_complex",
    "is_contiguous", "is_floating_point", "is_set_to", "ndimension", "nelement", "new_empty",
    "new_full", "new_ones", "new_zeros", "numel", "ones_like", "rand_like", "randn_like",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "size",
    "storage_offset", "stride", "zeros_like", "_has_compatible_shallow_copy_type",
}  # fmt: skip


def _needs_none(func: Callable[..., Any]) -> bool:
    """Whether a function of torch asks about a tensor, and not for its values."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):  # an attribute
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _WITH_VALUES
    return name in _WITHOUT_VALUES


def _hidden(values: Sequence[Any]) -> Iterator[Hidden]:
    for value in values:
        if isinstance(value, Hidden):
            yield value
        elif isinstance(value, tuple | list):
            yield from _hidden(value)
