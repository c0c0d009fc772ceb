"""A device of torch_tpu without a TPU: its library computes on the CPU; scripts/tpu installs both.

A process has one. Where no TPU is on the bus, torch_tpu makes no device of its own accord.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from spartito.names import ENV_SHARE_DEVICES

PYTHON = "SPARTITO_TEST_TPU"
"""The Python of that environment, as ``scripts/trials`` says it."""

SAYS_NOTHING = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONWARNINGS": "ignore"}


def environment(python: str) -> Mapping[str, str]:
    """What a program of that Python has to hear.

    Args:
        python: The path of it.
    """
    (library,) = Path(python).parents[1].glob("lib/python3*/site-packages/xla_plugins/*/*.so")
    return {**os.environ, **SAYS_NOTHING, "TPU_LIBRARY_PATH": str(library), ENV_SHARE_DEVICES: "1"}


def begin() -> None:
    """Have torch know the device, and count it."""
    # Of several processes each is alone on its chip: nothing joins those of a CPU's library.
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")
    told = {name: os.environ.pop(name) for name in names if name in os.environ}
    import torch

    loader: Any = import_module("torch_tpu._loader")
    loader._init_device("tpu")
    torch.ones(1, device="tpu")  # before that it counts what is on the bus
    os.environ.update(told)
