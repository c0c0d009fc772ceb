"""What tells one training from another of the same script: its options and its data."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from spartito.data.dataset import Dataset
from spartito.data.source import Source

OPTIONS, EXAMPLES = "options", "some_examples"
"""Under which names a backup has them."""

SAMPLED = 64
"""Examples that stand for a data set."""
TWICE = 8
"""Of these, how many are read twice, to see whether they come out the same."""
SECONDS = 5.0
"""After which no more are read."""


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each group of parameters, as JSON, without those that are no plain values.

    Args:
        optimizer: As it is now.
    """
    return [
        {name: plain for name, value in group.items() if (plain := _plain(value)) is not None}
        for group in optimizer.param_groups
    ]


def other_option(
    then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> tuple[str, Any, Any] | None:
    """The first option that differs: its name, and its values then and now.

    A strategy that cuts the model may have fewer groups on a task: these are not compared.
    """
    if len(then) != len(now):
        return None
    for number, (old, new) in enumerate(zip(then, now, strict=True), 1):
        for name in old:
            if name in new and old[name] != new[name]:
                where = f" of parameter group {number}" if len(now) > 1 else ""
                return f"{name}{where}", old[name], new[name]
    return None


def sample(chain: Dataset) -> list[str] | None:
    """Digests of some examples of a data set, spread over all of it, before random transforms.

    Reading them leaves the global random generators as they are.

    Args:
        chain: The data set.

    Returns:
        One digest for each, in the same order in each run, fewer where reading is slow. None
        where they cannot be compared: they come as a stream, from processes that must be the
        first to open the data, or are random themselves.
    """
    source = chain.source
    if not isinstance(source, Source) or chain.processes is not None or not len(source):
        return None
    began, found = time.monotonic(), list[str]()
    indices = spread(len(source), SAMPLED)
    try:
        with _untouched_generators():
            before = _generators()
            for index in indices:
                if time.monotonic() > began + SECONDS:
                    break
                found.append(digest(source[index]))
            again = [digest(source[index]) for index in indices[: min(TWICE, len(found))]]
            random_ones = _generators() != before or again != found[: len(again)]
    except Exception:  # one that cannot be read is the loader's to skip or to name
        return None
    return None if random_ones else found


def spread(count: int, most: int) -> list[int]:
    """Up to ``most`` of ``count`` indices, evenly spread; so are the first few of them."""
    bits = (most - 1).bit_length()
    turned = [int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits)]
    indices = [at * count // (1 << bits) for at in turned]
    return list(dict.fromkeys(indices))[:most]


def digest(example: Any) -> str:
    """A digest of an example: of its numbers, texts and bytes; of other objects their type."""
    found = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(example):
        if isinstance(leaf, torch.Tensor):
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            numbers = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            found.update(numbers.tobytes())
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            found.update(f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes())
        elif isinstance(leaf, bytes | bytearray):
            found.update(leaf)
        elif isinstance(leaf, str | int | float | complex | np.generic):
            found.update(repr(leaf).encode())
        elif callable(to_bytes := getattr(leaf, "tobytes", None)):  # a picture
            found.update(to_bytes())
        else:
            found.update(type(leaf).__qualname__.encode())
        found.update(b"\0")
    return found.hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return None


def _generators() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state()
    own = torch.get_rng_state().numpy().tobytes()
    return own, numpy[1].tobytes(), numpy[2:], random.getstate()


@contextmanager
def _untouched_generators() -> Iterator[None]:
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
