"""Bytes of a task, by what they hold."""

from __future__ import annotations

from spartito.planning.costs.parts import Situation

PROGRAM, PARAMETERS, GRADIENTS = "program and data", "parameters", "gradients"
OPTIMIZER, SCRATCH, ACTIVATIONS = "optimizer", "update", "activations"
BUFFERS = "exchange"

OURS = 55_000_000
"""Bytes of what no profile runs: exchanges, and the checkpoints and report of the chief.

Measured with torch 2.13 on x86-64: 47 MB for a task with a Python of its own, 66 MB for a fork.
"""


def held(
    situation: Situation,
    examples: float,
    *,
    parameters: float = 1.0,
    gradients: float = 1.0,
    optimizer: float = 1.0,
    activations: float = 1.0,
    exchange: float = 0.0,
) -> dict[str, float]:
    """What a task has in memory.

    Args:
        situation: What is planned.
        examples: Of its batch.
        parameters: The part of all parameters that it has.
        gradients: Of the gradients.
        optimizer: Of the optimizer's state, and of what an update has in between.
        activations: Of what the passes have of such a batch.
        exchange: Bytes for what others send, and it sends.
    """
    profile, model, cluster = situation.profile, situation.profile.model, situation.cluster
    forked = cluster.machines == 1 and cluster.workers > 1
    return {
        PROGRAM: OURS + max(0, profile.base_memory - forked * profile.fork_saves),
        PARAMETERS: model.parameters * parameters + model.buffers,
        GRADIENTS: model.gradients * gradients,
        OPTIMIZER: model.optimizer * optimizer,
        SCRATCH: profile.scratch * optimizer,
        ACTIVATIONS: profile.activations * examples * activations,
        BUFFERS: exchange,
    }
