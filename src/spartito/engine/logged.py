"""Figures of one's own: what a model, a loss or a callback reports while a trainer listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

from torch import Tensor

Listener: TypeAlias = Callable[[str, "Tensor | float", "Tensor | float | None"], None]
"""Takes a name, a value, and how much it counts, as `log` has them."""

_listener: Listener | None = None


def log(name: str, value: Tensor | float, count: Tensor | float | None = None) -> None:
    """Report a figure from anywhere in a model, a loss or a callback.

        class Net(nn.Module):
            def forward(self, x):
                hidden = self.encoder(x)
                sp.log("sparsity", (hidden == 0).float().mean())
                return self.head(hidden)

    Its mean over all examples of the epoch, on all replicas, stands in the history, the progress
    bar, the loggers and the report as ``name``, and as ``val_name`` for what is reported while the
    validation runs. Nobody waits for a device. Outside of `fit` and `evaluate` it does nothing.

    Args:
        name: Not that of another figure.
        value: A number, or a tensor of one: the mean of the examples of this replica's batch. A
            tensor ``(n, ...)`` counts as the values of n examples.
        count: Of how many the value is the mean, where these are no examples but tokens, say.

    Raises:
        UserError: The name is taken, or the value is no number.
    """
    if _listener is not None:
        _listener(name, value, count)


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """A block in which ``listener`` gets what is reported; None: nobody does.

    Args:
        listener: Takes what `log` is given.
    """
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def hearing(around: Callable[[Listener], Listener]) -> AbstractContextManager[None]:
    """A block in which another listener stands before the present one, if there is one.

    Args:
        around: Makes it of that.
    """
    return listening(None if _listener is None else around(_listener))


def of_rows(size: int) -> AbstractContextManager[None]:
    """A block whose reports are of so many examples, which are a part of a batch.

    Args:
        size: Of these a number is the mean.
    """

    def around(listener: Listener) -> Listener:
        def take(name: str, value: Tensor | float, count: Tensor | float | None) -> None:
            has_rows = isinstance(value, Tensor) and value.ndim
            listener(name, value, size if count is None and not has_rows else count)

        return take

    return hearing(around)
