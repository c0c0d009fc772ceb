"""Tensors cut along the axis "model" of a mesh, with replicas along "data"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from spartito.declared import Declared
from spartito.errors import UserError
from spartito.planning.costs.compute import own_step, passes, together
from spartito.planning.costs.exchange import all_reduce, between_models, machines_of
from spartito.planning.costs.memory import held
from spartito.planning.costs.parts import (
    COMPUTE,
    UPDATE,
    Cost,
    Situation,
    check_options,
    tasks_of_model,
)

OPTIONS: tuple[str, ...] = ("model",)
FIGURES, MEETINGS = 64, 2
"""Bytes of a step's figures, on which the tasks of a model agree in so many meetings."""


def candidates(situation: Situation) -> Iterable[Mapping[str, Any]]:
    """As `Costs.candidates`: each size of the axis that was looked at."""
    tasks = situation.cluster.tasks
    found = [{"model": size} for size in situation.profile.mesh if tasks % size == 0]
    return found or ({},)


def cost(strategy: Declared, situation: Situation) -> Cost:
    """As `Costs.cost`; the collectives of the forward and backward pass were counted."""
    check_options(strategy, OPTIONS)
    cluster, profile = situation.cluster, situation.profile
    size = tasks_of_model(strategy, "model", cluster.tasks)
    along = profile.mesh.get(size)
    if along is None:
        known = ", ".join(map(str, profile.mesh)) or "no number"
        raise UserError(
            f"mesh with model={size}: the layout cuts this model for {known} of tasks",
            "Take one of these, or see MeshStrategy.describe.",
        )
    replicas = cluster.tasks // size
    examples = situation.batch / replicas
    own = own_step(situation, examples)
    whole = sum(passes(situation, part, examples) for part in ("forward", "backward"))
    own[COMPUTE] -= whole * (1 - along.passes)
    own[UPDATE] *= along.parameters
    near = machines_of(situation, size)
    each = along.bytes * examples / max(1, along.calls)
    inside = all_reduce(situation, each, size, near) * along.calls
    inside += all_reduce(situation, FIGURES, size, near) * MEETINGS
    gradients = profile.model.gradients * along.parameters
    exchange = inside + between_models(situation, gradients, size)
    memory = held(
        situation,
        examples,
        parameters=along.parameters,
        gradients=along.parameters,
        optimizer=along.parameters,
        exchange=gradients,
    )
    return together(situation, own, exchange, memory, replicas)
