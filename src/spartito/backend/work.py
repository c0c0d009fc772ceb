"""What a call returns: it is done, or a message is still to come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_FOREVER = timedelta(0)


class Done(dist.Work):
    """A call that is complete. torch's C++ parts wait for its future, which is complete too."""

    def __init__(self, result: Sequence[Tensor] | Sequence[Sequence[Tensor]] = ()):
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True: a call that fails raises."""
        return True

    def exception(self) -> None:
        """None: a call that fails raises."""

    def synchronize(self) -> None:
        """Return at once."""

    def block_current_stream(self) -> None:
        """Return at once."""

    def result(self) -> list[Tensor]:
        """The tensors that the call wrote."""
        return list(self._result)  # type: ignore[arg-type]

    def source_rank(self) -> int:
        """-1: no rank sent, it was a collective operation."""
        return -1

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:  # type: ignore[type-arg]
        """A future that has the result."""
        future: torch.futures.Future = torch.futures.Future()  # type: ignore[type-arg]
        future.set_result(list(self._result))
        return future

    get_future_result = get_future


class Receive(Done):
    """A message that may be still to come: who waits for it takes it.

    Args:
        tensor: Where the message goes.
        progress: Takes messages that are there, and waits for this one if told to; returns whether
            it came.
    """

    def __init__(self, tensor: Tensor, progress: Callable[[Receive, bool], bool]) -> None:
        super().__init__([tensor])
        self._progress = progress
        self._source = -1
        self.came = False

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Wait for the message."""
        return self.came or self._progress(self, True)

    def is_completed(self) -> bool:
        """Whether the message is there."""
        return self.came or self._progress(self, False)

    is_success = is_completed

    def synchronize(self) -> None:
        """Wait for the message."""
        self.wait()

    def take(self, source: int) -> None:
        """Note that the message came from rank ``source``."""
        self._source = source
        self.came = True

    def source_rank(self) -> int:
        """The rank of the group that sent the message."""
        self.wait()
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:  # type: ignore[type-arg]
        """A future with the tensor, once the message is there."""
        self.wait()
        return super().get_future()

    get_future_result = get_future
