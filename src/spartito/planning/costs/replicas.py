"""Replicas with the whole model, which sum their gradients in every step; and one device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from spartito.declared import Declared
from spartito.planning.costs.compute import own_step, together
from spartito.planning.costs.exchange import all_gather, coded
from spartito.planning.costs.memory import held
from spartito.planning.costs.parts import UPDATE, Cost, Situation, check_options

OPTIONS: tuple[str, ...] = ("compress",)
COMPRESSES = "multi_worker_mirrored"
"""Which of them knows this option."""
KEPT = 4
"""Times the gradients that a compression has beside them: errors of two steps, numbers, sums."""


def candidates(situation: Situation) -> Iterable[Mapping[str, Any]]:
    """As `Costs.candidates`: as it is, and compressed between machines."""
    codes = situation.profile.machine.codes if situation.cluster.machines > 1 else ()
    return ({}, *({"compress": code} for code in codes))


def cost(strategy: Declared, situation: Situation) -> Cost:
    """As `Costs.cost`.

    On one machine replicas divide the update, and the optimizer's state exists once.
    """
    check_options(strategy, OPTIONS if strategy.name == COMPRESSES else ())
    if strategy.name == "one_device":
        own = own_step(situation, situation.batch)
        return Cost(own, held(situation, situation.batch), 0.0, situation.batch)
    cluster, model = situation.cluster, situation.profile.model
    examples, tasks = situation.local_batch, cluster.tasks
    own = own_step(situation, examples)
    is_one_machine = cluster.machines == 1
    if is_one_machine:
        own[UPDATE] /= tasks
    one_copy = strategy.name == "central_storage"
    compress = strategy.options.get("compress")
    if one_copy:
        exchange = all_gather(situation, model.gradients, tasks, cluster.machines)
    else:
        exchange = coded(situation, model.gradients, tasks, cluster.machines, compress)
    exchange *= 1 / situation.profile.accumulate
    part = 1 / tasks if is_one_machine else 1.0
    memory = held(
        situation,
        examples,
        parameters=1 / tasks if one_copy else 1.0,
        optimizer=part,
        exchange=model.gradients * (1 if compress is None else 1 + KEPT),
    )
    return together(situation, own, exchange, memory, tasks)
