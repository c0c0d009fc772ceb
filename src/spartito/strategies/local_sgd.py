"""Groups of replicas: synchronous inside, and loosely coupled with each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spartito.local.outer import Outer
from spartito.local.plan import TOKENS, Asked, Sites
from spartito.strategies.declaration import Strategy


@dataclass(frozen=True, eq=False)
class LocalSGDStrategy(Strategy):
    """Groups of replicas that meet every so many updates (Stich 2019; DiLoCo, Douillard 2023).

    Inside a group all is as under mirrored and multi_worker_mirrored, or as under sharded. Between
    meetings nothing goes from group to group.

    Args:
        groups: How many groups of neighbours, the ranks of each (``[[0, 1], [2]]``), or
            "machine".
        every: How many updates a group makes from one meeting to the next. There is one at the
            end of each epoch, too. With ``sites`` two numbers: from one meeting of neighbours
            to the next one, and of all, a multiple of it.
        outer: What a meeting makes of the groups' mean difference: None averages the models;
            "diloco" or ``{"lr": 0.7, "momentum": 0.9}`` is Nesterov's momentum; a function of
            the parameters returns any torch optimizer.
        weights: "tokens": a group counts for what its losses were divided by since the last
            meeting (examples, tokens); "equal": all count the same.
        compress: How what a group has moved goes to the others: None is as it is; "bf16",
            "8bit" and "4bit" numbers of fewer bits; "topk", "topk:0.01" the largest of them.
            What is left out is added to what is sent at the next meeting.
        fragments: Parts of the model, of whole layers, that meet in turn: each after ``every``
            updates, and no two after the same.
        sites: How many sites of neighbouring groups there are, or the numbers of the groups of
            each (``[[0, 1], [2]]``). Groups of a site average their models; ``outer`` and
            ``compress`` are for the meetings of all, in which a site goes by its average.
        overlap: For how many updates what a group has moved is under way to the others while
            training goes on; True is a quarter of ``every``, and less than from one fragment's
            meeting to the next one's; False waits for it.
        mixing: How much of its own values a group keeps at a meeting, from 0 to 1; None is
            half of it with ``overlap``, else 0. At the end of an epoch nothing is kept.
        inside: What holds in a group: None or "mirrored" is all of the model on each replica;
            "sharded" is a model in shards, as under `ShardedStrategy`: groups are of one
            size, and those with the same shard meet.
        zero: With "sharded" what is in shards, 1, 2 or 3; None is 3.
        block_bytes: With "sharded" the size from which on a module is a block of its own.
    """

    name = "local_sgd"
    implementation = "spartito.steps.local_sgd:LocalSGDStep"

    groups: Asked = 2
    every: int | Sequence[int] = 20
    outer: Outer = None
    weights: str = TOKENS
    compress: str | None = None
    fragments: int = 1
    sites: Sites = None
    overlap: bool | int = False
    mixing: float | None = None
    inside: str | None = None
    zero: int | None = None
    block_bytes: int | None = None
