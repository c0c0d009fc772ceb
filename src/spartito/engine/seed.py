"""One seed for all that draws at random in this process."""

from __future__ import annotations

import random

import numpy as np
import torch

from spartito.errors import UserError


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
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise UserError(f"seed={seed!r}", "Give a whole number from 0 to 4294967295.")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed
