"""Activations of a stage that are computed again in its backward pass.

A region of `torch.utils.checkpoint` runs its function once more, behind the stage's forward pass.
The operations of other stages are to be left out then as well, and what came from them is to be
taken: each region notes where in the program it begins, and goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.utils.checkpoint as regions

from spartito.engine.logged import listening
from spartito.mesh.functions import taking
from spartito.mesh.recomputation import ENTRANCE
from spartito.mesh.showing_modules import inside
from spartito.pipeline.replay import Replay

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""What torch asks for with each region: the context of its first pass, and of the second one."""


@contextmanager
def passing(replay: Replay) -> Iterator[None]:
    """A block with a forward pass of a stage, whose regions can be computed again behind it.

    Args:
        replay: What of the pass is computed.
    """
    begin: Any = getattr(regions, ENTRANCE, None)

    def noted(function: Any, preserve: bool, contexts: Contexts, *args: Any, **kwargs: Any) -> Any:
        args = tuple(map(replay.within_reach, args))  # a region keeps them, and not what they are
        again = _also(contexts, replay.again(replay.next))
        return begin(function, preserve, again, *args, **kwargs)

    setattr(regions, ENTRANCE, noted)
    try:
        with inside(), taking(replay.swap), replay:
            yield
    finally:
        setattr(regions, ENTRANCE, begin)


def _also(given: Contexts, replay: Replay) -> Contexts:
    """Those of a region whose second pass is one of ``replay``."""

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, second = given()
        return first, _both(second, replay)

    return contexts


@contextmanager
def _both(second: AbstractContextManager[Any], replay: Replay) -> Iterator[None]:
    with second, listening(None), passing(replay):  # it has reported its figures
        yield
