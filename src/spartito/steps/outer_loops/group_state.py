"""What groups that train apart have beside the merged model: in checkpoints, and out of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from spartito.checkpoint.cuts import Cut, part_of
from spartito.checkpoint.saved_state import Saved, unread
from spartito.collectives.collective import Collective
from spartito.engine.updates.optimizers import load_named_state, unwrap
from spartito.steps.prepared import Pair
from spartito.steps.state_parts import saved_gradients, saved_optimizer
from spartito.storage.tensors import unpack_state

SECTION = "groups"
"""Of a checkpoint: what each group alone has, and where they met last."""


def in_parts(optimizer: Mapping[str, Any], cuts: Mapping[str, Cut]) -> dict[str, Any]:
    """The named state of an optimizer, with the parts that this task has of tensors.

    Args:
        optimizer: Of this task.
        cuts: Of which parameters it has a part.
    """
    state = {
        name: {key: part_of(value, cuts.get(name)) for key, value in values.items()}
        for name, values in optimizer["state"].items()
    }
    return {**optimizer, "state": state}


def accumulated_by_all(
    pair: Pair, own: Mapping[str, Any], world: Collective, counts: bool
) -> dict[str, Any]:
    """What the batches since the last update have left in all groups.

    Args:
        pair: The prepared pair.
        own: What they have left in this one: `Pair.accumulated`.
        world: All tasks, which call this.
        counts: Whether this task speaks for its group.
    """
    factor = float(counts)
    named = dict(unwrap(pair.model).named_parameters())
    learning = {id(p) for p in pair.gradients.parameters}
    gradients = {}
    for name, parameter in named.items():
        if id(parameter) not in learning:
            continue
        found = own["gradients"].get(name)
        there = torch.tensor([0.0 if found is None else factor], dtype=torch.float64)
        whole = torch.zeros_like(parameter) if found is None else found * factor
        world.all_reduce(whole.detach())
        if world.all_reduce(there).item():
            gradients[name] = whole.detach()
    sums = torch.tensor([own["weight"], own["loss"]], dtype=torch.float64) * factor
    weight, loss = world.all_reduce(sums).tolist()
    return {**own, "gradients": gradients, "weight": weight, "loss": loss}


def like_of(saved: Saved) -> dict[str, Any]:
    """Of what groups a checkpoint is: as `Grouping.like`."""
    tree = saved.tree(SECTION)
    return {name: tree[name] for name in ("count", "sites") if name in tree}


def states_of(saved: Saved, index: int | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What `Fragments.load` takes.

    Args:
        saved: With a section of groups.
        index: The number of one's own; None: there were others.

    Returns:
        What all groups have in common, and what one's own has; tensors are still to be read.
    """
    tree, tensors = saved.tree(SECTION), unread(saved.tensors(SECTION))
    common = unpack_state(tree["common"], tensors)
    own = None if index is None else unpack_state(tree["own"][str(index)], tensors)
    return common, own


def load_own(pair: Pair, saved: Saved, index: int, kept: set[str], cuts: Mapping[str, Cut]) -> None:
    """Take back the state of a group's own optimizer, and gradients that wait.

    Args:
        pair: The prepared pair.
        saved: With a section of groups.
        index: The number of one's own.
        kept: The names of the parameters whose state this task keeps.
        cuts: Of which of them this task has a part.
    """
    model, tree = unwrap(pair.model), saved.tree(SECTION)
    names = {name for name, _ in model.named_parameters()}
    own = Saved(tree["own"][str(index)], lambda _: saved.tensors(SECTION))
    if "optimizer" in own:  # the first group's is in the section of its name
        state = saved_optimizer(own, kept, names, cuts)
        load_named_state(model, pair.optimizer, state)
    if "accumulated" in own:
        pair.saved = {**saved_gradients(own, names, {}), SECTION: True}
    pair.gradients.compared()
