"""Sharded tensors that go into regions of activation checkpointing.

A region of `torch.utils.checkpoint` keeps what went into it as autograd keeps tensors. Inside of
another region that is a copy, of which torch makes a plain tensor: what stands for a shard, and not
the shard. So regions get the shards themselves.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

import torch.utils.checkpoint as regions

from spartito.mesh.sharded_tensor import Sharded, made

ENTRANCE = "_checkpoint_without_reentrant_generator"
"""The function of torch that begins each region, also those of other libraries. It is torch's own
name: where another version has none, such regions are as torch makes them."""


@cache
def keep_shards() -> None:
    """Have regions keep shards."""
    begin: Any = getattr(regions, ENTRANCE, None)
    if begin is None:
        return

    @wraps(begin)
    def begin_with_shards(function: Any, *given: Any, **options: Any) -> Any:
        # Counted from the end: what comes first are torch's own options.
        cut = {
            at - len(given): (each.spec, each.axes)
            for at, each in enumerate(given)
            if type(each) is Sharded and not each.is_spoilt
        }
        if not cut:
            return begin(function, *given, **options)

        def again(*args: Any, **named: Any) -> Any:
            shown = list(args)
            for at, how in cut.items():
                shown[at] = made(shown[at], *how)
            return function(*shown, **named)

        kept = list(given)
        for at in cut:
            kept[at] = kept[at].local
        return begin(again, *kept, **options)

    setattr(regions, ENTRANCE, begin_with_shards)
