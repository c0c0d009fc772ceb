"""All of a state whose tensors lie on several tasks, on each of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spartito.collectives.collective import Collective

_BETWEEN = "\0"


def gathered(
    group: Collective,
    state: Mapping[str, Any],
    groups: Sequence[Sequence[str]],
    order: Sequence[str],
) -> dict[str, Any]:
    """Make whole what each task has a part of; all of them call it.

    Args:
        group: The tasks.
        state: The sections "model", "optimizer" and "accumulated" of this one.
        groups: The names of the optimizer's parameters, group by group.
        order: The names of the model's tensors, in their order.

    Returns:
        The same sections. What several tasks have is that of the first.
    """
    found = dict(state)
    values = whole(group, state["model"])
    found["model"] = {name: values[name] for name in order if name in values}
    optimizer = state["optimizer"]
    flat = {
        name + _BETWEEN + key: value
        for name, values in optimizer["state"].items()
        for key, value in values.items()
    }
    states: dict[str, dict[str, Any]] = {}
    for joint, value in whole(group, flat).items():
        name, _, key = joint.partition(_BETWEEN)
        states.setdefault(name, {})[key] = value
    all_ = zip(optimizer["groups"], groups, strict=True)
    found["optimizer"] = {
        **optimizer,
        "state": states,
        "groups": [{**own, "params": list(names)} for own, names in all_],
    }
    if "accumulated" in state:
        waiting = state["accumulated"]
        found["accumulated"] = {**waiting, "gradients": whole(group, waiting["gradients"])}
    return found


def whole(group: Collective, own: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors and plain values of all tasks, by name; all of them call it.

    Args:
        group: The tasks.
        own: Those of this one.

    Returns:
        Copies of all, from the first task that has each.
    """
    forms = {
        name: [list(value.shape), str(value.dtype).removeprefix("torch.")]
        if isinstance(value, Tensor)
        else [value]
        for name, value in own.items()
    }
    texts = group.all_gather_bytes(json.dumps(forms).encode())
    found: dict[str, Any] = {}
    for source, text in enumerate(texts):
        for name, form in json.loads(text).items():
            if name in found:
                continue
            if len(form) == 1:
                found[name] = form[0]
                continue
            made = torch.empty(form[0], dtype=getattr(torch, form[1]))
            if source == group.rank:
                made.copy_(own[name].detach())
            found[name] = group.broadcast(made, source)
    return found
