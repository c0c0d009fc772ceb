"""A script on a device of torch_tpu whose library computes on the CPU; what lay in its memory.

    python -m benchmarks.jobs.tpu_steps OUT SCRIPT [ARGUMENTS]

``OUT`` gets the tensors of the moment in which most bytes of them lived, and what the script said
where it ended early. Scripts of our own are
named instead: ``digits``, ``gpt`` or ``gpt2``, with a precision.
"""

from __future__ import annotations

import json
import runpy
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tpu import chip

chip.begin()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import spartito as sp  # noqa: E402
from spartito.data.sets.packaged import load_digits  # noqa: E402
from spartito.recipes.gpt import next_character  # noqa: E402

STEPS = 2
"""The second one is the first whose optimizer has its moments before it begins."""


class Living(TorchDispatchMode):
    """The tensors on the device, by the memory they lie in, and those of the fullest moment."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now: dict[int, tuple[str, list[int]]] = {}
        self._bytes = self._most = 0
        self.fullest: list[tuple[str, list[int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, found)):
            if isinstance(leaf, Tensor) and leaf.device.type == "tpu":
                self._add(leaf)
        if self._bytes > self._most:
            self._most, self.fullest = self._bytes, list(self._now.values())
        return found

    def _add(self, tensor: Tensor) -> None:
        memory = tensor.untyped_storage()
        key, size = memory._cdata, memory.nbytes()
        if key in self._now:
            return
        fits = tensor.nbytes == size  # not where the first that is seen of it is a view
        shape = list(tensor.shape) if fits else [size // tensor.element_size()]
        self._now[key] = str(tensor.dtype).removeprefix("torch."), shape
        self._bytes += size
        weakref.finalize(memory, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        del self._now[key]
        self._bytes -= size


def digits(precision: str) -> None:
    """The packaged digits, 64 at a time, by the recipe's network."""
    x, y = map(torch.from_numpy, load_digits())
    _train(sp.models.MnistMLP(), nn.CrossEntropyLoss(), x / 255, y, 64, precision)


def gpt(precision: str) -> None:
    """The recipe's GPT: 0.8 million parameters, 32 times 64 characters."""
    _write_on(sp.models.GPT.small(65, 0.0), 65, 32, precision)


def gpt2(precision: str) -> None:
    """A GPT of the size of the smallest GPT-2: 124 million parameters, 8 times 1024 tokens."""
    kinds = 50257
    _write_on(sp.models.GPT(kinds, 1024, 12, 12, 768, 0.0, packed=True), kinds, 8, precision)


def _write_on(net: sp.models.GPT, kinds: int, batch: int, precision: str) -> None:
    tokens = torch.arange(STEPS * batch * net.context).view(-1, net.context) % kinds
    _train(net, next_character, tokens, tokens, batch, precision)


def _train(net: nn.Module, loss: Any, x: Tensor, y: Tensor, batch: int, precision: str) -> None:
    trainer = sp.Trainer(
        net,
        optimizer=torch.optim.AdamW(net.parameters(), 1e-3),
        loss=loss,
        strategy=sp.TPUStrategy(),
        precision=precision,
    )
    count = batch * STEPS
    trainer.fit((x[:count], y[:count]), epochs=1, batch_size=batch, verbose=0)


OURS: dict[str, Callable[[str], None]] = {"digits": digits, "gpt": gpt, "gpt2": gpt2}


def main() -> None:
    """Run the script."""
    out, script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    living, ended = Living(), ""
    try:
        with living:
            if script in OURS:
                OURS[script](*arguments)
            else:
                runpy.run_path(script, run_name="__main__")
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
        raise
    finally:  # also of a script that ends at what only a TPU computes
        Path(out).write_text(json.dumps({"tensors": living.fullest, "ended": ended}))


if __name__ == "__main__":
    main()
