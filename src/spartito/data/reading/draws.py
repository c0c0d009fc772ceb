"""Random draws of code that is not ours: the same on every replica, and in every resume."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from spartito.data.reading.order import example_generator


class Draws:
    """While it is entered, the global generators of torch, numpy and Python are in its own state.

    The state begins as a function of (seed, epoch), and goes on where it was at the last exit.
    Outside of it the generators are as they would be without it: what a sampler or a stream
    draws does not depend on what the model draws (dropout), which differs between replicas.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        words = example_generator(seed, epoch, 2**62).integers(2**63, size=3)
        self._python = random.Random(int(words[0])).getstate()
        self._torch = torch.Generator().manual_seed(int(words[1])).get_state()
        self._numpy: Any = np.random.MT19937(int(words[2]))

    def __enter__(self) -> None:
        """Put the generators into this state."""
        self._swap()

    def __exit__(self, *exc_info: object) -> None:
        """Put them back."""
        self._swap()

    def _swap(self) -> None:
        python, mine = random.getstate(), self._torch
        random.setstate(self._python)
        self._python, self._torch = python, torch.get_rng_state()
        torch.set_rng_state(mine)
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        np.random.set_bit_generator(self._numpy)  # type: ignore[attr-defined]
        self._numpy = bits
