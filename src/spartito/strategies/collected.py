"""The whole state of an optimizer whose parts replicas hold, on each of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spartito.collectives.collective import Collective
from spartito.engine.divided import Span, joined
from spartito.storage.tensors import pack_state, unpack_state

Spans = Mapping[str, tuple[Tensor, Sequence[Span]]]
"""By the user's names: a tensor laid out as the parameter, and who of the group has what of it."""


def named_spans(model: nn.Module, spans: Mapping[int, Sequence[Span]]) -> Spans:
    """Spans by the names of the parameters, from those by their ids."""
    return {name: (p.detach(), spans.get(id(p), ())) for name, p in model.named_parameters()}


def collect(group: Collective, own: dict[str, Any], spans: Spans) -> dict[str, Any]:
    """The state of all spans, in the order of the parameters, from each replica's ``own``.

    Settings are those of the first: an optimizer may count in them. All call it.
    """
    known = {name: values for name, values in own["state"].items() if values}
    tree, tensors = pack_state({**own, "state": known}, "optimizer")
    kinds = {name: [list(t.shape), str(t.dtype)[6:]] for name, t in tensors.items()}
    told = group.all_gather_bytes(json.dumps([tree, kinds]).encode())
    states = [_rebuilt(group, owner, text, tensors) for owner, text in enumerate(told)]
    held = {}
    for name, (like, owners) in spans.items():
        parts = [
            (span, states[span.rank]["state"][name])
            for span in owners
            if name in states[span.rank]["state"]
        ]
        if parts:
            held[name] = joined(parts, like)
    return {**states[0], "state": held}


def _rebuilt(group: Collective, owner: int, told: bytes, own: dict[str, Tensor]) -> dict[str, Any]:
    """The state that ``owner`` has told of, once it has sent the tensors; ``own`` are ours."""
    tree, kinds = json.loads(told)
    mine = owner == group.rank
    tensors = {
        name: group.broadcast(
            own[name] if mine else torch.empty(shape, dtype=getattr(torch, dtype)), owner
        )
        for name, (shape, dtype) in kinds.items()
    }
    found: dict[str, Any] = unpack_state(tree, tensors)
    return found
