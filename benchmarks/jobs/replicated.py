"""Trains a small GPT under mirrored and under groups that meet seldom, one after the other.

Each of the processes is a group of its own. All sides begin at the same weights: those of a
synchronous training of some hundred updates, as in the paper.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

import spartito as sp
from benchmarks.common import flush_denormals
from spartito.cluster.resolver import resolve
from spartito.recipes.gpt import next_character
from spartito.wire.addresses import split_address

CONTEXT = 32
WARM = 50
RATE = 3e-3


def main() -> None:
    """Rank 0 prints a line of JSON for each side, and one of all at the end."""
    options = argparse.ArgumentParser()
    options.add_argument("sides", help="JSON: names, and the options of local_sgd or null")
    options.add_argument("--before", type=int, required=True, help="synchronous updates")
    options.add_argument("--updates", type=int, required=True)
    options.add_argument("--look", type=int, required=True, help="updates between evaluations")
    options.add_argument("--batch", type=int, required=True, help="examples of each process")
    options.add_argument("--seed", type=int, required=True)
    given = options.parse_args()
    torch.set_num_threads(1)
    flush_denormals()
    sides: dict[str, dict[str, Any] | None] = json.loads(given.sides)
    begun, _ = train(0, None, given.before, given.before, given.batch, given.seed, {})
    found = {}
    for number, (side, values) in enumerate(sides.items(), 1):
        numbers = given.updates, given.look, given.batch, given.seed
        _, found[side] = train(number, values, *numbers, begun)
        if os.environ["RANK"] == "0":
            print(json.dumps({side: found[side]}), flush=True)
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)


def train(
    number: int,
    values: Mapping[str, Any] | None,
    updates: int,
    look: int,
    batch: int,
    seed: int,
    begun: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights at the end, and losses on the validation text with what was sent for them."""
    cluster = resolve()
    assert cluster.rendezvous is not None
    host, port = split_address(cluster.rendezvous)
    # Each job has a port of its own to meet at.
    there = replace(cluster, rendezvous=f"{host}:{port + number}")
    strategy: Any
    if values is None:
        strategy = sp.MirroredStrategy(cluster=there)
    else:
        strategy = sp.LocalSGDStrategy(cluster=there, **values)
    world = cluster.world_size

    def rate(step: int) -> float:
        return min(1, (step + 1) / WARM) * (
            0.55 + 0.45 * math.cos(math.pi * min(1, step / updates))
        )

    text = sp.data.characters(subset="training", context=CONTEXT)
    validation = sp.data.characters(subset="validation", context=CONTEXT)
    with strategy.scope():
        torch.manual_seed(seed)
        net = sp.models.GPT(len(text.classes), CONTEXT, 1, 2, 32, 0.0)
        if begun:
            net.load_state_dict(begun)
        optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, betas=(0.9, 0.99))
    trainer = sp.Trainer(
        net,
        optimizer=optimizer,
        loss=next_character,
        strategy=strategy,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
        clip_norm=1.0,
        seed=seed,
    )
    history = trainer.fit(
        text.shuffle().batch(batch * world, drop_remainder=True).repeat(),
        epochs=updates // look,
        steps_per_epoch=look,
        validation_data=validation.batch(64 * world),
        verbose=0,
    )
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    size = sum(p.numel() * p.element_size() for p in net.parameters())
    meetings = updates if values is None else sum(history.history["meetings"])
    strategy.close()
    return weights, {"losses": history.history["val_loss"], "meetings": meetings, "bytes": size}


if __name__ == "__main__":
    main()
