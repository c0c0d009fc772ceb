"""Replicas that keep shards: ZeRO 1, 2 and 3."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from spartito.declared import Declared
from spartito.errors import UserError
from spartito.planning.costs.compute import own_step, together
from spartito.planning.costs.exchange import Exchange, all_gather, all_reduce
from spartito.planning.costs.memory import held
from spartito.planning.costs.parts import UPDATE, Cost, Situation, check_options, whole_number

OPTIONS: tuple[str, ...] = ("zero",)
BLOCK = 4 << 20
"""Bytes from which on a module is gathered by itself; as `steps.exchanges.sharded.BLOCK`."""


def candidates(situation: Situation) -> Iterable[Mapping[str, Any]]:
    """As `Costs.candidates`: each stage."""
    return ({"zero": zero} for zero in (1, 2, 3))


def cost(strategy: Declared, situation: Situation) -> Cost:
    """As `Costs.cost`.

    On one machine zero=3 gathers nothing: the parameters exist once, in memory that all read.
    Machines with several tasks each exchange whole sums: their group has no reduce-scatter.
    """
    check_options(strategy, OPTIONS)
    zero = whole_number(strategy, "zero", 3)
    if zero > 3:
        raise UserError(f"sharded: zero={zero}", "It is 1, 2 or 3.")
    cluster, model = situation.cluster, situation.profile.model
    examples, tasks, machines = situation.local_batch, cluster.tasks, cluster.machines
    own = own_step(situation, examples)
    own[UPDATE] /= tasks
    is_layered = machines > 1 and cluster.workers > 1
    scatter = all_reduce if is_layered else all_gather
    exchange = scatter(situation, model.gradients, tasks, machines)
    gather = all_gather(situation, model.parameters, tasks, machines)
    if zero < 3:
        exchange += gather
    elif machines > 1:  # before the forward pass of a block, and before its backward pass
        exchange += (gather + _meetings(situation)) * 2
    exchange *= 1 / situation.profile.accumulate
    block = min(model.parameters, max(BLOCK, situation.profile.largest_part))
    memory = held(
        situation,
        examples,
        parameters=1.0 if zero < 3 else 1 / tasks,
        gradients=1.0 if zero < 2 else 1 / tasks,
        optimizer=1 / tasks,
        exchange=2 * block if zero > 1 else model.gradients,
    )
    return together(situation, own, exchange, memory, tasks)


def _meetings(situation: Situation) -> Exchange:
    """The meetings of all blocks but the first one, whose bytes are counted already."""
    link, machine = situation.cluster.link, situation.profile.machine
    blocks = sum(part.parameters >= BLOCK for part in situation.profile.parts)
    delay = machine.sockets.start + (0.0 if link is None else link.delay)
    return Exchange(0.0, max(0, blocks - 1) * delay, 0.0)
