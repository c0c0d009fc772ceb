"""torch.compile traces what runs inside of a compiled program: our methods must not be."""

from __future__ import annotations

import types
from contextlib import suppress


def skip(*classes: type) -> None:
    """Have Dynamo run the methods of ``classes``, and what they call, as they are.

    A decorator would do that too, and cost every call some microseconds.
    """
    with suppress(ImportError, AttributeError):  # a torch without Dynamo
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )

        strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        for one in classes:
            for member in vars(one).values():
                if isinstance(member, types.FunctionType):
                    set_code_exec_strategy(member.__code__, strategy)
