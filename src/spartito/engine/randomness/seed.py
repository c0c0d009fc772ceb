"""One seed for all that draws at random in this process."""

from __future__ import annotations

import json
import random
from base64 import b64decode, b64encode
from typing import Any

import numpy as np
import torch

from spartito.accelerators import random_states, set_random_states
from spartito.errors import UserError
from spartito.numeric import is_whole


def seed_everything(seed: int, workers: bool = False) -> int:
    """Seed `random`, numpy and torch (all devices) of this process, as before a model is built.

    Data sets and deterministic training draw from the trainer's own ``seed``.

    Args:
        seed: From 0 to 2**32 - 1, which is what numpy takes.
        workers: As in Lightning. Either way torch seeds the worker processes of its data loaders
            from this seed, and random transforms of ours draw alike on any number of replicas.

    Returns:
        The seed.

    Raises:
        UserError: If ``seed`` is not one.
    """
    if not is_whole(seed) or not 0 <= seed < 2**32:
        raise UserError(f"seed={seed!r}", "Give a whole number from 0 to 4294967295.")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def random_state() -> str:
    """Where the generators of `random`, numpy and torch (also on its accelerators) are, as text."""
    version, words, gauss = random.getstate()
    bits = dict(np.random.get_state(legacy=False))
    return json.dumps(
        {
            "torch": _text(torch.get_rng_state().numpy()),
            "accelerator": {
                kind: [_text(state.numpy()) for state in states]
                for kind, states in random_states().items()
            },
            "python": [version, _text(np.array(words, np.uint32)), gauss],
            "numpy": {**bits, "state": {k: _text(v) for k, v in bits["state"].items()}},
        }
    )


def set_random_state(text: str) -> None:
    """Put them where `random_state` found them; another number of devices keep theirs."""
    state = json.loads(text)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(_array(words).tolist()), gauss))
    bits = state["numpy"]
    if bits["bit_generator"] == np.random.get_state(legacy=False)["bit_generator"]:
        np.random.set_state({**bits, "state": {k: _array(v) for k, v in bits["state"].items()}})
    torch.set_rng_state(torch.from_numpy(_array(state["torch"])))
    here = random_states()
    for kind, texts in state.get("accelerator", {}).items():
        if len(texts) == len(here.get(kind, ())):
            set_random_states(kind, [torch.from_numpy(_array(each)) for each in texts])


def _text(value: Any) -> Any:
    """An array as [dtype, base64]; a number as it is."""
    if not isinstance(value, np.ndarray):
        return value
    return [value.dtype.str, b64encode(value.tobytes()).decode()]


def _array(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return np.frombuffer(bytearray(b64decode(value[1])), value[0])
